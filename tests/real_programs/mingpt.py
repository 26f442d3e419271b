"""A loop as minGPT's: a Trainer with callbacks, an endless sampler, zero_grad before backward."""

from collections import defaultdict

import torch
from torch.utils.data import DataLoader, RandomSampler

from tests.real_programs.data import Sentences
from tests.real_programs.models import GPT


class Trainer:
    def __init__(self, model, train_dataset, max_iters):
        self.model, self.train_dataset, self.max_iters = model, train_dataset, max_iters
        self.callbacks = defaultdict(list)
        self.optimizer = None
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model = self.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        train_loader = DataLoader(
            self.train_dataset,
            sampler=RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            batch_size=8,
        )
        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if self.max_iters is not None and self.iter_num >= self.max_iters:
                break


log = []


def batch_end_callback(trainer):
    log.append(trainer.loss.item())
    if trainer.iter_num % 30 == 29:
        trainer.model.eval()
        with torch.no_grad():
            x, y = next(iter(DataLoader(trainer.train_dataset, batch_size=16)))
            log.append(trainer.model(x, y)[1].item())
        trainer.model.train()


torch.manual_seed(1337)
model = GPT()
trainer = Trainer(model, Sentences(), max_iters=90)
trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()
optimizer = trainer.optimizer
