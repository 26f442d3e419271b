"""Loaders of every kind with numbers as samples, and how they are iterated in the tests."""

import io
import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer_hooks.data.loader import Batches
from trainvitals.clock import SystemClock


class Numbers(Dataset):
    def __init__(self, size=24):
        self.size, self.loaded = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Resuming:
    """A sampler with state: how much it has given of an order that a word in its state decides."""

    def __init__(self, size):
        self.size, self.given, self.seed, self.loaded = size, 0, 0, False

    def __len__(self):
        return self.size

    def __iter__(self):
        if not self.loaded:
            self.given, self.seed = 0, self.seed + 1
        self.loaded = False
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed))
        for index in order.tolist()[self.given :]:
            self.given += 1
            yield index

    def state_dict(self):
        return {"given": self.given, "seed": self.seed}

    def load_state_dict(self, state):
        self.given, self.seed, self.loaded = state["given"], state["seed"], True


def stream(loader, epochs=1, **keywords):
    waits = []
    made = Batches(loader, epochs=epochs, clock=SystemClock(), waited=waits.append, **keywords)
    return made, waits


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def saved(state):
    """Return the state as a checkpoint gives it back: read without running any code."""
    raw = io.BytesIO()
    torch.save(state, raw)
    raw.seek(0)
    return torch.load(raw, weights_only=True)


def seed(number=7):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def noise():
    """Draw from all of the process's generators, as a training does between two batches."""
    return torch.rand(3).tolist(), random.random(), float(np.random.rand())


def own_generator(**keywords):
    generator = torch.Generator().manual_seed(11)
    return DataLoader(Numbers(), 4, shuffle=True, generator=generator, **keywords)


LOADERS = {
    "shuffle": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "in order": lambda: DataLoader(Numbers(23), 4),
    "distributed": lambda: DataLoader(
        Numbers(48), 4, sampler=DistributedSampler(Numbers(48), num_replicas=2, rank=1)
    ),
    "own generator": own_generator,
    "drawn as it goes": lambda: DataLoader(
        Numbers(),
        4,
        sampler=RandomSampler(range(100), True, 60, generator=torch.Generator().manual_seed(3)),
    ),
    "unbatched": lambda: DataLoader(Numbers(10), None, shuffle=True),
    "sampler of batches": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(24)), 5, False)
    ),
    "sampler with state": lambda: DataLoader(Numbers(), 4, sampler=Resuming(24)),
    "list": lambda: [[i] for i in range(6)],
    "stateful": lambda: StatefulDataLoader(Numbers(), 4, shuffle=True),
    "stateful, own generator": lambda: StatefulDataLoader(
        Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
}
WORKERS = {
    "workers": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "own generator, workers": lambda: own_generator(num_workers=2),
    "sampler with state, workers": lambda: DataLoader(
        Numbers(), 4, sampler=Resuming(24), num_workers=2
    ),
    "stateful, workers": lambda: StatefulDataLoader(Numbers(), 4, shuffle=True, num_workers=2),
}
ALL = LOADERS | WORKERS


def uninterrupted(make, epochs, noise=noise):
    """Return every batch with what the process's generators give after it."""
    seed()
    seen, loader = [], make()
    for epoch in range(epochs):
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        seen += [(plain(batch), noise()) for batch in loader]
    return seen


def rng():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore(kept):
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
