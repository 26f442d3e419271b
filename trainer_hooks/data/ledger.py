"""Which samples fed which step on this rank: noted for a while, told of each bad step.

Everything here fails open: training never waits for it, and never ends by it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

import torch

from trainer_hooks.data.files import BadBatch, DataWriter
from trainer_hooks.data.loader import Batch
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.step.emit import Emitter
from trainvitals.io.sample_ids import StepSamples
from trainvitals.records import BatchNoted

MAX_STEPS = 64
"""Steps whose samples are remembered until they are judged, and a while longer."""
MAX_IDS = 4096
"""Ids in one event; their number is told whatever it is."""
MAX_ID_BYTES = 32 << 10
"""Of all ids in one event, where they are words."""
MAX_WORD = 256
"""Characters of one id."""

SampleIds = Callable[[Any], Iterable[Any]]
"""Gives the ids of a batch's samples: numbers or words."""


@dataclass(slots=True)
class _Step:
    """What fed a step."""

    step: int
    attempt: int
    batches: list[Batch]
    ids: list[Sequence[Any] | None]
    """Of each batch; None where they are not known."""
    kept: list[Any]


class DataLedger:
    """The last steps' samples. ``fed`` with each step, ``judged`` when its verdict is there.

    Args:
        emitter: tells of bad steps.
        writer: writes files of the run.
        faults: counts what fails.
        rank: this process's.
        lag: steps between an update and its verdict.
    """

    def __init__(
        self, emitter: Emitter, writer: DataWriter, faults: FaultCounter, *, rank: int, lag: int
    ) -> None:
        self._emitter = emitter
        self._writer = writer
        self._faults = faults
        self._rank = rank
        self._lag = lag
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self.sample_ids: SampleIds | bool | None = None
        """Where given, the ids of every step are kept in a file; True keeps the indices."""
        self.keep_batches = False
        """Whether the batches of a bad step are kept in a file."""

    def fed(self, step: int, attempt: int, batches: Sequence[Batch]) -> None:
        """Note what fed a step; call before its update."""
        if not batches:
            return
        with self._faults.fail_open("data.ledger"):
            ids = [self._ids(batch) for batch in batches]
            contents = [batch.content for batch in batches if batch.content is not None]
            kept = contents if self.keep_batches else []
            light = [batch._replace(content=None) for batch in batches]
            self._steps.pop(step, None)  # of a branch that was left
            self._steps[step] = _Step(step, attempt, light, ids, kept)
            while len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
            for old in islice(reversed(self._steps.values()), self._lag + 1, None):
                if not old.kept:
                    break
                old.kept = []
            if self.sample_ids:
                self._write(self._steps[step])

    def _ids(self, batch: Batch) -> Sequence[Any] | None:
        """Return the batch's ids; the user's own function has to read them now, from the batch."""
        if callable(self.sample_ids) and batch.content is not None:
            with self._faults.fail_open("sample_ids"):
                return _listed(self.sample_ids(batch.content))
            return None
        return batch.indices

    def _write(self, entry: _Step) -> None:
        if all(ids is None for ids in entry.ids):
            return
        first = entry.batches[0].position
        self._writer.put(
            StepSamples(
                step=entry.step,
                attempt=entry.attempt,
                epoch=first.epoch,
                first_batch=first.batch,
                num_batches=len(entry.batches),
                sample_ids=tuple(plain_id(i) for ids in entry.ids for i in ids or ()),
            )
        )

    def judged(self, step: int, bad: bool) -> None:
        """Tell what fed the step if it was bad; its batches need not be held any longer."""
        with self._faults.fail_open("data.ledger"):
            entry = self._steps.get(step)
            if entry is None:
                return
            kept, entry.kept = entry.kept, []
            if bad:
                self._tell(entry, kept)

    def _tell(self, entry: _Step, kept: list[Any]) -> None:
        first, file = entry.batches[0].position, ""
        reported = [ids for ids in entry.ids if ids is not None]
        sample_ids = _as_many_as_fit(plain_id(i) for ids in reported for i in ids)
        if kept:
            name = f"batches/step-{entry.step:08d}-{entry.attempt}-rank-{self._rank}.pt"
            content = {
                "step": entry.step,
                "attempt": entry.attempt,
                "epoch": first.epoch,
                "first_batch": first.batch,
                "sample_ids": list(sample_ids),
                "batches": kept,
            }
            file = name if self._writer.put(BadBatch(name, content)) else ""
        event = BatchNoted(
            epoch=first.epoch,
            first_batch=first.batch,
            num_batches=len(entry.batches),
            sample_ids=sample_ids,
            num_samples=sum(map(len, reported)) if len(reported) == len(entry.ids) else -1,
            file=file,
        )
        self._emitter.event(event, step=entry.step, attempt=entry.attempt)

    def close(self) -> None:
        """Wait, for a bounded time, for what is being written."""
        with self._faults.fail_open("data.ledger"):
            self._writer.close()


def plain_id(value: Any) -> int | str:
    """Return an id as a number or a word; a sampler's may be a tensor or of another kind."""
    if isinstance(value, str):
        return value[:MAX_WORD]
    try:
        number = index(value)
    except TypeError:
        return str(value)[:MAX_WORD]
    return number if -(2**63) <= number < 2**63 else str(number)[:MAX_WORD]


def _listed(ids: Any) -> list[Any]:
    """Return the ids as a list; never from a device, which the loop would have to wait for."""
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise ValueError(f"sample_ids gave a tensor on {ids.device}; give numbers of the host")
        return [int(i) for i in ids.flatten().tolist()]
    return list(ids)


def _as_many_as_fit(ids: Iterable[int | str]) -> tuple[int | str, ...]:
    """Return the first ids that one event has room for."""
    fitting: list[int | str] = []
    room = MAX_ID_BYTES
    for sample_id in islice(ids, MAX_IDS):
        room -= 2 + len(sample_id.encode()) if isinstance(sample_id, str) else 5
        if room < 0:
            break
        fitting.append(sample_id)
    return tuple(fitting)
