"""Completions of the latest steps, in memory; those where a problem began are written to a file."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from trainer_hooks.failopen import FaultCounter
from trainvitals.errors import UsageError
from trainvitals.io.completions import (
    Completion,
    StoredCompletions,
    cut_completion,
    store_completions,
)
from trainvitals.records import Finding

MAX_STEPS = 64
"""Steps in memory: a problem is certain some values after it began."""
MAX_BYTES = 4 << 20
_CLOSE_SECONDS = 2.0


class CompletionRing:
    """At most three completions of each of the latest steps: lowest, median and highest reward."""

    def __init__(self, *, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES) -> None:
        self._max_steps, self._max_bytes = max_steps, max_bytes
        self._steps: OrderedDict[tuple[int, int], list[Completion]] = OrderedDict()
        """By attempt and step."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        rewards: Sequence[float],
        *,
        step: int,
        attempt: int,
    ) -> None:
        """Add the completions of a step; several calls for one step count together.

        Raises:
            UsageError: the lengths differ.
        """
        if not len(prompts) == len(completions) == len(rewards):
            raise UsageError(
                f"observe_samples() got {len(prompts)} prompts, {len(completions)} completions and "
                f"{len(rewards)} rewards; their numbers must be equal",
                hint="repeat each prompt once per completion",
            )
        numbers = [float(reward) for reward in rewards]
        samples = [
            cut_completion(prompts[i], completions[i], numbers[i]) for i in choose_three(numbers)
        ]
        earlier = self._steps.pop((attempt, step), [])
        both = [*earlier, *samples]
        selected = [both[i] for i in choose_three([sample.reward or 0.0 for sample in both])]
        self._steps[attempt, step] = selected
        self.num_bytes += sum(map(_size, selected)) - sum(map(_size, earlier))
        while len(self._steps) > self._max_steps or self.num_bytes > self._max_bytes:
            _, dropped = self._steps.popitem(last=False)
            self.num_bytes -= sum(map(_size, dropped))

    def find(self, finding: Finding, attempt: int) -> StoredCompletions | None:
        """Return the completions of the finding's first step that has any; otherwise the latest."""
        steps = [step for of_attempt, step in self._steps if of_attempt == attempt]
        if not steps:
            return None
        step = next((step for step in steps if step >= finding.onset_step), steps[-1])
        return StoredCompletions(
            step=step,
            attempt=attempt,
            finding=finding.kind,
            onset_step=finding.onset_step,
            reported_step=finding.step,
            samples=tuple(self._steps[attempt, step]),
        )


def choose_three(rewards: Sequence[float]) -> list[int]:
    """Return the indices of the lowest, the median and the highest reward; NaN counts as lowest."""
    order = sorted(
        range(len(rewards)),
        key=lambda i: -math.inf if math.isnan(rewards[i]) else rewards[i],
    )
    return [order[i] for i in sorted({0, len(order) // 2, len(order) - 1})] if order else []


def _size(sample: Completion) -> int:
    """Return the bytes of a completion in memory: at most four per character."""
    return 4 * (len(sample.prompt) + len(sample.completion))


class CompletionWriter:
    """Writes each file in a separate thread, because the loop must not wait for a disk."""

    def __init__(self, run_dir: Path, faults: FaultCounter) -> None:
        self._run_dir, self._faults = run_dir, faults
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()

    def write(self, stored: StoredCompletions) -> None:
        """Start to write a file."""
        thread = threading.Thread(
            target=self._write, args=(stored,), name="vitals-completions", daemon=True
        )
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def _write(self, stored: StoredCompletions) -> None:
        with self._faults.fail_open("completions.write"):
            store_completions(self._run_dir, stored)

    def close(self) -> None:
        """Wait up to 2 seconds for each file; not in a forked child."""
        if os.getpid() == self._pid:
            for thread in self._threads:
                thread.join(_CLOSE_SECONDS)
