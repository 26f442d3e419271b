"""Misses of a fingerprint, and the cost of a step's fingerprint word."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.replicas import Replicas
from trainer_hooks.recovery.state import TrainingState
from trainer_hooks.tensors.copying import fingerprint_of, word_of
from trainvitals.detect.replicas import EVERY
from vitals_bench.measure import interleave
from vitals_bench.rows import Grid, Row, at_most
from vitals_bench.training import Loop, size_of, tokens

_SHAPE = (512, 1024)
_LANES = 4093
"""Words after which the positions of a fingerprint repeat."""


def _word(tensor: Tensor) -> float:
    return word_of(fingerprint_of([tensor], tensor.device)).item()


def _flips(count: int) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        words = tensor.view(-1).view(torch.int32)
        for at in torch.randperm(words.numel())[:count].tolist():
            bit = int(torch.randint(32, ()))
            words[at] ^= -(2**31) if bit == 31 else 1 << bit

    return change


def _signs(tensor: Tensor) -> None:
    words = tensor.view(-1).view(torch.int32)
    for at in torch.randperm(words.numel() // 2)[:2].tolist():
        words[2 * at + 1] ^= -(2**31)


def _swap_elements(tensor: Tensor) -> None:
    a, b = torch.randperm(tensor.numel())[:2].tolist()
    _swap(tensor.view(-1), a, b)


def _swap_rows(tensor: Tensor) -> None:
    a, b = torch.randperm(len(tensor))[:2].tolist()
    _swap(tensor, a, b)


def _swap_in_lane(tensor: Tensor) -> None:
    flat = tensor.view(torch.int64).view(-1)
    a = int(torch.randint(flat.numel() - _LANES, ()))
    _swap(flat, a, a + _LANES)


def _swap(tensor: Tensor, a: int, b: int) -> None:
    kept = tensor[a].clone()
    tensor[a] = tensor[b]
    tensor[b] = kept


def _stale_row(tensor: Tensor) -> None:
    row = int(torch.randint(len(tensor), ()))
    tensor[row] -= 1e-3 * torch.randn(_SHAPE[1])


CHANGES: dict[str, Callable[[Tensor], None]] = {
    "2 flips": _flips(2),
    "3 flips": _flips(3),
    "8 flips": _flips(8),
    "2 flips of the highest bit of 8 bytes": _signs,
    "2 elements that changed places": _swap_elements,
    "2 rows that changed places": _swap_rows,
    "a row of the step before": _stale_row,
    f"8 bytes that changed places with those {_LANES} places on": _swap_in_lane,
}


def measure_misses(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield how often a change that is no single flip leaves the word as it was."""
    torch.manual_seed(0)
    tensor = torch.randn(_SHAPE)
    times = 50 if quick else 3000
    before, lines = _word(tensor), []
    for name, change in CHANGES.items():
        missed = 0
        for _ in range(times if "places on" not in name else 50):
            changed = tensor.clone()
            change(changed)
            is_changed = not torch.equal(changed.view(torch.int32), tensor.view(torch.int32))
            missed += is_changed and _word(changed) == before
        lines.append((name, times if "places on" not in name else 50, missed))
    yield Grid(
        title=f"Changes that one fingerprint misses ({_SHAPE[0]} x {_SHAPE[1]} float32)",
        columns=("change", "times", "missed"),
        rows=tuple(lines),
        note=f"Words of 8 bytes that are a multiple of {_LANES} words apart are added up: an "
        "exchange of two of them is not seen, by construction.",
    )


def measure_cost(*, quick: bool) -> Iterator[Row]:
    """Yield the cost of the fingerprint words compared with the step."""
    for millions in (5,) if quick else (10, 50):
        loop = Loop(millions, tokens(2 if quick else 8))
        loop.step()
        state = TrainingState(loop.model, [loop.optimizer])
        replicas = Replicas(
            state,
            Ranks(0, 2, 0, None),
            keys=list(state.parameters),
            groups=((0, 1),),
            places=("", ""),
            optimizers=[loop.optimizer],
            faults=FaultCounter(),
            every=EVERY,
        )

        def words(replicas: Replicas = replicas) -> None:
            for step in range(10 * EVERY):
                replicas.word(step, max_norm=1.0)

        arms: dict[str, Callable[[], object]] = {"words": words, "step": loop.step}
        times = interleave(arms, rounds=4 if quick else 12, clock_ns=time.process_time_ns)
        word, step = (
            statistics.median(times["words"]) / (10 * EVERY),
            statistics.median(times["step"]),
        )
        yield Row(
            name=f"the word of a step, as a share of it, {size_of(loop.model)}",
            ours=100 * word / step,
            unit="%",
            goal=at_most(0.1),
            note=f"{1e6 * word:.0f} us of {1e3 * step:.0f} ms, of CPU; mean of {10 * EVERY} "
            "steps, optimizer state included",
        )
