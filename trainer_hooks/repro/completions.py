"""Completions of the latest steps, in memory; those where a problem began are written to a file."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer_hooks.failopen import FaultCounter
from trainvitals.errors import UsageError
from trainvitals.io.completions import (
    Completion,
    StoredCompletions,
    cut_completion,
    store_completions,
)
from trainvitals.printable import name_type
from trainvitals.records import Finding

MAX_STEPS = 64
"""Steps in memory: a problem is certain some values after it began."""
MAX_BYTES = 4 << 20
_CLOSE_SECONDS = 2.0


class CompletionRing:
    """Keeps three completions of each of the latest steps: lowest, median and highest reward.

    Any thread may add some, because rewards are often computed in several. A forked child keeps
    none: another thread may have held the lock when it was forked.
    """

    def __init__(self, *, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES) -> None:
        self._max_steps, self._max_bytes = max_steps, max_bytes
        self._steps: OrderedDict[tuple[int, int], list[Completion]] = OrderedDict()
        """By attempt and step."""
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        rewards: Sequence[float | None],
        *,
        step: int,
        attempt: int,
    ) -> None:
        """Add the completions of a post-training step; several calls for one step count together.

        Raises:
            UsageError: an argument is not a sequence, the lengths differ, or a reward is not a
                number.
        """
        if os.getpid() != self._pid:
            return
        _check_lengths(prompts, completions, rewards)
        numbers = [_to_number(reward) for reward in rewards]
        samples = [
            cut_completion(prompts[i], completions[i], numbers[i]) for i in choose_three(numbers)
        ]
        with self._lock:
            earlier = self._steps.pop((attempt, step), [])
            both = [*earlier, *samples]
            selected = [both[i] for i in choose_three([sample.reward or 0.0 for sample in both])]
            self._steps[attempt, step] = selected
            self.num_bytes += sum(map(_size, selected)) - sum(map(_size, earlier))
            while len(self._steps) > self._max_steps or self.num_bytes > self._max_bytes:
                _, dropped = self._steps.popitem(last=False)
                self.num_bytes -= sum(map(_size, dropped))

    def find(self, finding: Finding, attempt: int) -> StoredCompletions | None:
        """Return the completions of the first step from a finding's onset; otherwise the latest."""
        with self._lock:
            by_step = {step: texts for (of, step), texts in self._steps.items() if of == attempt}
        if not by_step:
            return None
        step = min((s for s in by_step if s >= finding.onset_step), default=max(by_step))
        return StoredCompletions(
            step=step,
            attempt=attempt,
            finding=finding.kind,
            onset_step=finding.onset_step,
            reported_step=finding.step,
            samples=tuple(by_step[step]),
        )


def choose_three(rewards: Sequence[float]) -> list[int]:
    """Choose the completions of lowest, median and highest reward, by index; NaN is lowest."""
    order = sorted(
        range(len(rewards)),
        key=lambda i: -math.inf if math.isnan(rewards[i]) else rewards[i],
    )
    return [order[i] for i in sorted({0, len(order) // 2, len(order) - 1})] if order else []


def _check_lengths(*arguments: object) -> None:
    """Refuse arguments of ``observe_samples`` that are not sequences of equal length.

    Raises:
        UsageError: they are not.
    """
    if not all(hasattr(value, "__len__") and not isinstance(value, str) for value in arguments):
        types = ", ".join(map(name_type, arguments))
        raise UsageError(
            f"observe_samples() got {types}; it needs three lists of equal length",
            hint="pass prompts, completions and rewards, one entry per completion",
        )
    num_prompts, num_completions, num_rewards = map(len, arguments)  # type: ignore[arg-type]
    if not num_prompts == num_completions == num_rewards:
        raise UsageError(
            f"observe_samples() got {num_prompts} prompts, {num_completions} completions and "
            f"{num_rewards} rewards; their numbers must be equal",
            hint="repeat each prompt once per completion",
        )


def _to_number(reward: float | None) -> float:
    """Return a completion's reward as a number; None, which TRL gives without one, is NaN.

    Raises:
        UsageError: it is not a number. The message has no value, which may be a completion.
    """
    if reward is None:
        return math.nan
    try:
        return float(reward)
    except Exception:  # noqa: BLE001 - a third-party __float__ may raise anything
        raise UsageError(
            f"observe_samples() got {name_type(reward)} as a reward; it must be one number",
            hint="the order is observe_samples(prompts, completions, rewards)",
        ) from None


def _size(sample: Completion) -> int:
    """Return the bytes of a completion in memory: at most four per character."""
    return 4 * (len(sample.prompt) + len(sample.completion))


class CompletionWriter:
    """Writes files of completions in threads, because the loop must not wait for a disk.

    Args:
        run_dir: directory of the run.
        faults: counts failed writes, for example because the disk is full.
        on_stored: called in that thread once a file exists.
    """

    def __init__(
        self, run_dir: Path, faults: FaultCounter, on_stored: Callable[[StoredCompletions], None]
    ) -> None:
        self._run_dir, self._faults, self._on_stored = run_dir, faults, on_stored
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        """Held during a write: two findings of a step could use the same temporary file."""
        self._pid = os.getpid()

    def write(self, stored: StoredCompletions) -> None:
        """Start to write a file of completions to the run directory."""
        thread = threading.Thread(
            target=self._write, args=(stored,), name="vitals-completions", daemon=True
        )
        thread.start()
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def _write(self, stored: StoredCompletions) -> None:
        """Write a file of completions, in its thread; a full disk is counted, not raised."""
        with self._faults.fail_open("completions.write"), self._lock:
            store_completions(self._run_dir, stored)
            self._on_stored(stored)

    def close(self) -> None:
        """Wait up to 2 seconds for the files of completions; not in a forked child."""
        if os.getpid() != self._pid:
            return
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
