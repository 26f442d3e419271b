"""Holds rows of ranks until the step that they belong to is whole. Pure.

Ranks' rows arrive in batches, each rank's in order and none in step with another's. A step is
merged once every awaited rank has come past it. A rank that stays away is waited for so long, and
then no more until it speaks again: its values are missing from what is merged, and are counted.
Steps are ordered by (attempt, step), for attempts' ids grow with time and a newer one may go back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainvitals.detect.fleet.base import MergedStep
from vitals_collector.live.step_merge import Ints, Key, LayerPart, Mask, Rows, merge

Writer = tuple[str, str]
"""An incarnation and one of its streams."""

BEFORE_ALL: Key = (-(2**63), -(2**63))
MOST_RANKS = 16_384
"""Ranks that are merged: a number in a batch's header must not cost memory without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """How long a rank is waited for."""

    patience_seconds: float = 20.0
    """Agents ship every second or two; one that is further behind is not waited for."""
    most_rows: int = 1 << 16
    """Rows of ranks that may be held; beyond, the oldest steps are merged as they are."""
    least_steps: int = 50
    """Steps that are held in any case, however many ranks there are."""


@dataclass(slots=True)
class _Held:
    """Rows that came together, and wait for others."""

    since_ns: int
    rows: Rows
    names: Mapping[int, str] | None = None
    """Of rows of layers, what their numbers are called."""


@dataclass(slots=True)
class _Cadence:
    """At which steps layers are written: not before ``last + gap`` again, as far as is known."""

    attempt: int
    last: int
    gap: int = 1

    @property
    def promise(self) -> Key:
        """Up to here no more of them will come."""
        return self.attempt, self.last + self.gap - 1


class _Positions:
    """The highest key that each rank has written, and which ranks are not waited for."""

    def __init__(self) -> None:
        self.keys = np.full((0, 2), BEFORE_ALL[0], dtype=np.int64)
        self.absent = np.zeros(0, dtype=np.bool_)

    def reach(self, num: int) -> None:
        """Have a place for so many ranks."""
        more = num - len(self.absent)
        if more > 0:
            self.keys = np.pad(self.keys, ((0, more), (0, 0)), constant_values=BEFORE_ALL[0])
            self.absent = np.pad(self.absent, (0, more))

    def move(self, rows: Rows, merged: Key) -> None:
        """Take in which rows there are; who writes beyond what is merged is waited for again."""
        order = np.lexsort((rows.step, rows.attempt, rows.origin.rank))
        ranks = rows.origin.rank[order]
        newest = order[np.flatnonzero(np.append(ranks[1:] != ranks[:-1], True))]
        ranks = rows.origin.rank[newest]
        self.reach(int(ranks[-1]) + 1)
        keys = np.stack((rows.attempt[newest], rows.step[newest]), axis=1)
        ahead = _is_after(keys, self.keys[ranks])
        self.keys[ranks[ahead]] = keys[ahead]
        self.absent[ranks[_is_after(keys, np.array([merged]))]] = False

    def lowest(self, num: int) -> Key | None:
        """Return the key that all awaited ones of the first ``num`` have come to."""
        self.reach(num)
        keys = self.keys[:num][~self.absent[:num]]
        if not len(keys):
            return None
        attempt = int(keys[:, 0].min())
        return attempt, int(keys[keys[:, 0] == attempt, 1].min())

    def overtake(self, num: int, merged: Key) -> None:
        """Wait no more for those of the first ``num`` that have not come to what is merged."""
        self.reach(num)
        self.absent[:num] |= _is_after(np.array([merged]), self.keys[:num])


def _is_after(keys: Ints, others: Ints) -> Mask:
    """Return of each pair whether the first key is the higher one."""
    after: Mask = (keys[:, 0] > others[:, 0]) | (
        (keys[:, 0] == others[:, 0]) & (keys[:, 1] > others[:, 1])
    )
    return after


@dataclass(slots=True)
class StepMerger:
    """Holds rows until their step is whole. Steps come out in order, each once.

    ``world_size`` is that of the newest start of rank 0; set it when that changes. Rows name their
    writers by the number that ``number_of`` gives.
    """

    config: MergeConfig = field(default_factory=MergeConfig)
    world_size: int = 0
    merged: Key = BEFORE_ALL
    """The last key that came out."""
    num_missing: int = 0
    """Values of ranks that were not there when their step was merged."""
    num_late: int = 0
    """Rows that came after their step had been merged: they are not looked at."""
    num_held: int = 0
    """Rows of ranks that wait."""
    _held: list[_Held] = field(default_factory=list)
    _positions: _Positions = field(default_factory=_Positions)
    _numbers: dict[Writer, int] = field(default_factory=dict)
    _read: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """By a writer's number: the last of its rows that was added."""
    _cadence: _Cadence | None = None
    _awaits_layers: bool = False

    @property
    def absent(self) -> frozenset[int]:
        """Ranks that are not waited for until they speak again."""
        return frozenset(np.flatnonzero(self._positions.absent).tolist())

    @property
    def is_empty(self) -> bool:
        """Whether no row waits."""
        return not self._held

    @property
    def most_held(self) -> int:
        """Rows of ranks that may wait."""
        return max(self.config.most_rows, self.config.least_steps * self._num_ranks)

    def number_of(self, writer: Writer) -> int:
        """Return the number by which rows name this writer."""
        number = self._numbers.setdefault(writer, len(self._numbers))
        if number >= len(self._read):
            self._read = np.pad(self._read, (0, number + 64), constant_values=-1)
        return number

    def add(self, rows: Rows, now_ns: int) -> None:
        """Take rows of ranks' steps in; those of one writer come in their order."""
        self._note(rows)
        rows = rows.take(rows.origin.rank < MOST_RANKS)
        if not len(rows):
            return
        np.minimum(rows.origin.world_size, MOST_RANKS, out=rows.origin.world_size)
        self._positions.move(rows, self.merged)
        self.num_held += self._hold(_Held(now_ns, rows))

    def add_layers(self, part: LayerPart, now_ns: int) -> None:
        """Take rows of layers in."""
        rows = part.rows
        if not len(rows):
            return
        for attempt, step in zip(rows.attempt.tolist(), rows.step.tolist(), strict=True):
            cadence = self._cadence
            if cadence is None or attempt != cadence.attempt or step < cadence.last:
                gap = cadence.gap if cadence is not None else 1
                self._cadence = _Cadence(attempt, step, gap)
            elif step > cadence.last:
                self._cadence = _Cadence(attempt, step, step - cadence.last)
        self._awaits_layers = self._awaits_layers or rows.last() > self.merged
        self._note(rows)
        self._hold(_Held(now_ns, rows, part.names))

    def _note(self, rows: Rows) -> None:
        np.maximum.at(self._read, rows.origin.writer, rows.seq)

    def _hold(self, held: _Held) -> int:
        late = held.rows.until(self.merged)
        if late.any():
            self.num_late += int(late.sum())
            held.rows = held.rows.take(~late)
        if len(held.rows):
            self._held.append(held)
        return len(held.rows)

    def ready(self, now_ns: int, *, gate: Key | None = None) -> list[MergedStep]:
        """Return the steps that are whole or waited for long enough.

        Args:
            now_ns: the clock by which rows were added.
            gate: rows at and before this key have all been added; None: all that there are have.
        """
        until = max(self._whole(), self._overdue(now_ns), self._too_many())
        if gate is not None:
            until = min(until, gate)
        if until <= self.merged or not self._held:
            return []
        taken, layers = self._taken(until)
        if not taken:
            return []  # layers only: of steps that no rank wrote
        merged = merge(taken, layers)
        last = merged.steps[-1]
        self.merged = (last.attempt, last.step)
        self.num_missing += merged.num_missing
        self._positions.overtake(self._num_ranks, self.merged)
        if self._cadence is not None and self._cadence.promise < self.merged:
            self._awaits_layers = False
        return merged.steps

    def _taken(self, until: Key) -> tuple[list[Rows], list[LayerPart]]:
        """Hold the rows up to a key no more, and return them."""
        taken: list[Rows] = []
        layers: list[LayerPart] = []
        kept: list[_Held] = []
        for held in self._held:
            mine = held.rows.until(until)
            if mine.any():
                due_rows = held.rows.take(mine)
                if held.names is None:
                    self.num_held -= len(due_rows)
                    taken.append(due_rows)
                else:
                    layers.append(LayerPart(held.names, due_rows))
            if not mine.all():
                held.rows = held.rows.take(~mine)
                kept.append(held)
        self._held = kept
        return taken, layers

    @property
    def _num_ranks(self) -> int:
        return min(self.world_size, MOST_RANKS) or len(self._positions.absent)

    def _whole(self) -> Key:
        """Return the key that every awaited writer has come to."""
        lowest = self._positions.lowest(self._num_ranks)
        awaited = [] if lowest is None else [lowest]
        if self._awaits_layers and self._cadence is not None:
            awaited.append(self._cadence.promise)
        return min(awaited, default=BEFORE_ALL)

    def _overdue(self, now_ns: int) -> Key:
        waited = now_ns - int(self.config.patience_seconds * 1e9)
        old = (held.rows.last() for held in self._held if held.since_ns <= waited)
        return max(old, default=BEFORE_ALL)

    def _too_many(self) -> Key:
        """Return the key up to which steps must come out for the rest to be few enough."""
        most = self.most_held
        if self.num_held <= most:
            return BEFORE_ALL
        ranks = [held.rows for held in self._held if held.names is None]
        attempt = np.concatenate([rows.attempt for rows in ranks])
        step = np.concatenate([rows.step for rows in ranks])
        at = np.lexsort((step, attempt))[len(step) - most - 1]
        return int(attempt[at]), int(step[at])

    # ------------------------------------------------------------------------------- over restarts

    def done(self) -> dict[Writer, int]:
        """Return the sequence number up to which each writer's rows need not be read again."""
        done = self._read.copy()
        for held in self._held:
            np.minimum.at(done, held.rows.origin.writer, held.rows.seq - 1)
        return dict(zip(self._numbers, done[: len(self._numbers)].tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return what must outlive a restart, as JSON types; the rows held are read again."""
        cadence = self._cadence
        return {
            "merged": list(self.merged),
            "absent": sorted(self.absent),
            "cadence": None if cadence is None else [cadence.attempt, cadence.last, cadence.gap],
            "awaits_layers": self._awaits_layers,
            "num_missing": self.num_missing,
            "num_late": self.num_late,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the merger that gave ``state``; what it held must be added again."""
        attempt, step = state["merged"]
        self.merged = (int(attempt), int(step))
        absent = [int(rank) for rank in state["absent"]]
        self._positions = _Positions()
        self._positions.reach(max(absent, default=-1) + 1)
        self._positions.absent[absent] = True
        cadence = state["cadence"]
        self._cadence = None if cadence is None else _Cadence(*cadence)
        self._awaits_layers = bool(state["awaits_layers"])
        self.num_missing, self.num_late = int(state["num_missing"]), int(state["num_late"])


__all__ = ["BEFORE_ALL", "MOST_RANKS", "MergeConfig", "StepMerger", "Writer"]
