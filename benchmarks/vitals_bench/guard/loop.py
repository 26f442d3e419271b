"""A whole training step: wall time with and without Vitals, compared with peers; our CPU time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.monitor import Monitor
from vitals_bench.measure import Call, interleave, medians, spread
from vitals_bench.peers.lightning import steps_of_a_trainer
from vitals_bench.peers.loggers import LOGGERS, is_installed, open_logger
from vitals_bench.rows import Row, at_most
from vitals_bench.training import Loop, size_of, tokens, watched

BARE = "the bare loop with a clip"


class OwnTime:
    """CPU time of the thread inside ``monitor.step``, the optimizer's own step left out."""

    def __init__(self, monitor: Monitor, optimizer: Optimizer) -> None:
        self.seconds: list[float] = []
        self._monitor = monitor
        self._left_out = self._began = 0.0
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._began = time.thread_time()

    def _end(self, *_: Any) -> None:
        self._left_out += time.thread_time() - self._began

    def step(self, loss: Tensor) -> None:
        """Make the step and note what of it was ours."""
        self._left_out, begin = 0.0, time.thread_time()
        self._monitor.step(loss, max_norm=1.0)
        self.seconds.append(time.thread_time() - begin - self._left_out)


def measure_loop(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of one training step of about ten million parameters."""
    millions, rounds, batch = (1, 4, tokens(2)) if quick else (10, 8, tokens(16))
    with ExitStack() as stack:
        loops = {name: Loop(millions, batch) for name in ("bare", "again", "ours", "tutorials")}
        ours = loops["ours"]
        monitor = stack.enter_context(
            watched(ours.model, ours.optimizer, tokens_per_step=batch[:, 1:].numel())
        )
        own = OwnTime(monitor, ours.optimizer)
        arms: dict[str, Call] = {
            "bare": loops["bare"].step,
            "ours": lambda: own.step(ours.backward()),
            "again": loops["again"].step,
            "tutorials": loops["tutorials"].step_as_in_tutorials,
        }
        folder = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        for peer in filter(is_installed, LOGGERS):
            logger = open_logger(peer, folder)
            stack.callback(logger.close)
            arms[peer] = Loop(millions, batch).logged_by(logger)
        median_ms = medians(interleave(arms, rounds=rounds), scale=1e3)
        trained = _in_a_trainer(Loop(millions, batch), loops["bare"], rounds, folder)
    yield from _own(own.seconds[-rounds:], loops["bare"].clip_seconds[-rounds:], median_ms["bare"])
    size = f"{size_of(ours.model)} and {batch[:, 1:].numel():,} tokens"
    yield from _wall(median_ms, size)
    yield trained


def _own(seconds: list[float], clips: list[float], bare_ms: float) -> Iterator[Row]:
    mine, clip = statistics.median(seconds) * 1e3, statistics.median(clips) * 1e3
    yield Row(
        name="CPU time of our own calls in a step, norms included",
        ours=100 * mine / bare_ms,
        unit="% of a bare step",
        goal=at_most(1),
        note=f"{mine:.2f} ms of {bare_ms:.0f} ms; the clip that they replace has {clip:.2f} ms",
    )


def _wall(median_ms: dict[str, float], size: str) -> Iterator[Row]:
    noise = spread(median_ms["again"], median_ms["bare"])
    names = {
        "ours": f"a whole step of {size}, watched",
        "tutorials": "a whole step with a norm and .item() of each parameter, as in tutorials",
    }
    for arm in ("ours", "tutorials", *LOGGERS):
        yield Row(
            name=names.get(arm, f"a whole step with {arm}"),
            ours=median_ms.get(arm),
            unit="ms",
            peer=BARE,
            theirs=median_ms["bare"],
            spread=noise,
            note="" if arm in median_ms else f"{arm}: not installed",
        )


def _in_a_trainer(loop: Loop, bare: Loop, rounds: int, folder: Path) -> Row:
    """Lightning owns its loop, so its steps take turns with bare ones in a hook of its own."""
    name = "a whole step in a Lightning Trainer that logs 12 scalars"
    if not is_installed("lightning"):
        return Row(name=name, ours=None, unit="ms", peer=BARE, note="lightning: not installed")
    trained, plain = steps_of_a_trainer(loop, bare.step, rounds, folder)
    ours, theirs = statistics.median(trained) * 1e3, statistics.median(plain) * 1e3
    return Row(name=name, ours=ours, unit="ms", peer=BARE, theirs=theirs)
