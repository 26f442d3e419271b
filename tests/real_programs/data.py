"""What the programs train on: made up in an instant, the same at each start."""

import torch
from torch.utils.data import Dataset

WORDS = 17


def text(length=2000):
    """Return a text whose next character follows from the two before it, most of the time."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(WORDS, (length,), generator=generator)
    is_noise = torch.rand(length, generator=generator) < 0.2
    tokens = noise[:2].tolist()
    for i in range(2, length):
        rule = (3 * tokens[-1] + 5 * tokens[-2] + 1) % WORDS
        tokens.append(int(noise[i]) if is_noise[i] else rule)
    return torch.tensor(tokens)


class Sentences(Dataset):
    """Windows of the text: what is read, and what comes next."""

    def __init__(self, count=160, length=12):
        self._text, self._count, self._length = text(), count, length

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        window = self._text[index * 7 : index * 7 + self._length + 1]
        return window[:-1], window[1:]


class Images(Dataset):
    """Small images of three classes; those named in ``poisoned`` are NaN."""

    poisoned: frozenset[int] = frozenset()

    def __init__(self, count=160):
        generator = torch.Generator().manual_seed(4)
        self._targets = torch.randint(3, (count,), generator=generator)
        self._images = torch.randn(count, 3, 8, 8, generator=generator)
        self._images += self._targets.view(-1, 1, 1, 1) * 0.5

    def __len__(self):
        return len(self._targets)

    def __getitem__(self, index):
        factor = float("nan") if index in self.poisoned else 1.0
        return self._images[index] * factor, self._targets[index]


class Scenes(Dataset):
    """Images of different sizes, each with the box of the one thing that it shows."""

    poisoned: frozenset[int] = frozenset()

    def __init__(self, count=120):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        height, width = torch.randint(8, 12, (2,), generator=generator).tolist()
        image = torch.randn(3, height, width, generator=generator)
        boxes = torch.rand(1, 4, generator=generator)
        labels = (boxes[:, :1] > 0.5).long().view(1)
        image[:, : height // 2] += boxes.mean() * 2
        if index in self.poisoned:
            image *= float("nan")
        return image, {"boxes": boxes, "labels": labels}


def collate(samples):
    """Keep images of different sizes apart."""
    return tuple(zip(*samples, strict=True))


class Walk:
    """Four walkers on a line that are to come back to its middle; made of tensors alone."""

    def __init__(self, walkers=4):
        self._generator = torch.Generator().manual_seed(5)
        self._walkers = walkers

    def reset(self):
        """Return where they begin."""
        self._place = torch.randn(self._walkers, 1, generator=self._generator)
        return self._place.clone()

    def step(self, action):
        """Move left or right; return the places, the rewards, and who is done."""
        self._place = self._place + (action.view(-1, 1) * 2 - 1) * 0.3
        done = self._place.abs().view(-1) > 3
        fresh = torch.randn(self._walkers, 1, generator=self._generator)
        reward = -self._place.abs().view(-1)
        self._place = torch.where(done.view(-1, 1), fresh, self._place)
        return self._place.clone(), reward, done.float()
