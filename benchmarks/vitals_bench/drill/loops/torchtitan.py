"""torchtitan: FSDP2 by block, warm-up and decay, a loader with state."""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import trainvitals

vocabulary, width, length, batch_size = 64, 32, 16, 8
training_steps, warmup_steps = 600, 20


class Transformer(nn.Module):
    """A causal transformer of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.output(hidden)
        return logits


class Documents:
    """An endless stream of this rank's batches; its state is the number of batches."""

    def __init__(self, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._num_batches = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            seed = 2 * self._num_batches + self._dp_rank
            self._num_batches += 1
            generator = torch.Generator().manual_seed(seed)
            first = torch.randint(vocabulary, (batch_size, 1), generator=generator)
            steps = torch.randint(1, 3, (batch_size, length + 1), generator=generator)
            tokens = (first + steps.cumsum(1)) % vocabulary
            yield tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self._num_batches = state["num_batches"]


def lr_factor(step: int) -> float:
    """Return the factor of the learning rate: linear up, then linear down."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return max(0.0, (training_steps - step) / (training_steps - warmup_steps))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="guard")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    dataloader = Documents(dist.get_rank())

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = batch
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    with trainvitals.watch(
        model,
        optimizer,
        lr_scheduler,
        run="torchtitan",
        mode=options.mode,
        checkpoints=options.mode == "heal",
        tokens_per_step=batch_size * length * dist.get_world_size(),
        total_steps=training_steps,
    ) as monitor:
        for batch in monitor.batches(dataloader, probe=loss_of):
            loss = loss_of(batch)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
            if monitor.step_index >= training_steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
