"""Host reads of device values, what an import adds, and a step by the events of a GPU."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitals_bench.measure import spread
from vitals_bench.rows import Row, at_most, exactly
from vitals_bench.training import gpt, size_of, tokens, watched

WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item")
"""Operators whose result the host waits for."""
_ASKING = tuple(
    f"trainer_hooks.{m}" for m in ("tensors.gradients", "step.phases", "guard.optimizers")
)
"""The modules that ask whether a read waits."""


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a value on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and pass on."""
        self.count += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def measure_reads(*, quick: bool) -> Iterator[Row]:
    """Yield the rows that need a count, a fresh process, or a GPU."""
    yield _reads(steps=5 if quick else 50)
    yield from _imports(processes=2 if quick else 7)
    yield _on_a_gpu(steps=5 if quick else 50)


def _reads(steps: int) -> Row:
    models = gpt(1), gpt(1)
    plain, guarded = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for model in models
    )
    batch, added = tokens(1), 0
    with ExitStack() as stack:
        for module in _ASKING:  # on a CPU a read waits for nothing, and is made
            stack.enter_context(patch(f"{module}.reads_are_free", lambda device: False))
        monitor = stack.enter_context(watched(models[1], guarded))
        for _ in range(steps):
            models[0](batch).backward()
            with Reads() as bare:
                torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
                plain.step()
            loss = models[1](batch)
            loss.backward()
            with Reads() as ours:
                monitor.step(loss, max_norm=1.0)
            added += ours.count - bare.count
    return Row(
        name="host reads of device values that a step with a fused optimizer adds",
        ours=added / steps,
        unit="reads",
        goal=exactly(0),
        note="the way that is taken on a GPU",
    )


_IMPORT = """
import json, time
a = time.perf_counter()
import torch
b = time.perf_counter()
import trainer_hooks
c = time.perf_counter()
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True)
d = time.perf_counter()
trainer_hooks.watch
e = time.perf_counter()
print(json.dumps({"torch": b - a, "hooks": c - b, "watch": e - d}))
"""


def _imports(processes: int) -> Iterator[Row]:
    measured = []
    for _ in range(processes):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=120, check=True
        )
        measured.append(json.loads(done.stdout))
    middle = {name: statistics.median(f[name] for f in measured) * 1e3 for name in measured[0]}
    for part, name, goal in (
        ("hooks", "import trainer_hooks, after import torch", at_most(30.0)),
        ("watch", "first use of trainer_hooks.watch, after an optimizer was made", None),
    ):
        yield Row(
            name=name,
            ours=middle[part],
            unit="ms",
            peer="import torch",
            theirs=middle["torch"],
            goal=goal,
            note=f"median of {processes} processes",
        )


def _on_a_gpu(steps: int) -> Row:
    name, peer = "a step on a GPU, by its own events", "the bare loop with a clip"
    if not torch.cuda.is_available():
        return Row(name=name, ours=None, unit="ms", peer=peer, note="skipped: no CUDA device here")
    batch = tokens(16).cuda()
    times: dict[str, list[float]] = {"bare": [], "ours": [], "again": []}
    models = {arm: gpt(50).cuda() for arm in times}
    optimizers = {
        arm: torch.optim.AdamW(model.parameters(), fused=True) for arm, model in models.items()
    }
    with watched(models["ours"], optimizers["ours"]) as monitor:
        for step in range(steps + 5):
            for arm, model in models.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                loss = model(batch)
                loss.backward()
                if arm == "ours":
                    monitor.step(loss, max_norm=1.0)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizers[arm].step()
                    optimizers[arm].zero_grad()
                end.record()
                end.synchronize()
                if step >= 5:
                    times[arm].append(begin.elapsed_time(end))
    median_ms = {arm: statistics.median(values) for arm, values in times.items()}
    return Row(
        name=f"{name}, {size_of(models['ours'])}",
        ours=median_ms["ours"],
        unit="ms",
        peer=peer,
        theirs=median_ms["bare"],
        spread=spread(median_ms["again"], median_ms["bare"]),
    )
