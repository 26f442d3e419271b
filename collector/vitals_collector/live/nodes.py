"""Joins what an agent sampled of its node's GPUs at one time, for the watchers of nodes."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.detect.fleet.base import Value
from trainvitals.rows import Schema, column_of
from vitals_collector.live.step_join import Writer

GPU_COLUMNS = (
    "memory_total_bytes",
    "throttle_reasons",
    "sm_clock_hertz",
    "temperature_celsius",
    "power_watts",
    "ecc_corrected_errors",
    "ecc_uncorrected_errors",
    "last_xid",
)
"""Columns of a GPU that a watcher looks at, and none of the node's own; a test holds the watchers
to them. A GPU that answers none of these is gone."""
_MOST_SAMPLES = 4_096
"""Rows of GPUs that wait for the node's own row; beyond, the oldest are dropped and counted."""


class HostRow(NamedTuple):
    """One row of a node or of one of its GPUs: what watchers look at in it."""

    seq: int
    monotonic_ns: int
    time_unix_ns: int
    values: Mapping[str, Value]


class Round(NamedTuple):
    """What an agent sampled at one time: a ``NodeSample`` without a step."""

    node: str
    time_unix_ns: int
    gpus: Mapping[str, Mapping[str, Value]]


class _Waiting(NamedTuple):
    writer: Writer
    uuid: str
    row: HostRow


@dataclass(slots=True)
class _Node:
    hosts: deque[_Waiting] = field(default_factory=deque)
    gpus: list[_Waiting] = field(default_factory=list)


class NodeMerger:
    """Joins the rows of a node's GPUs to the node's own.

    An agent writes its node's row first in each round, then those of the GPUs: what it wrote from
    one row of the node to before the next belongs together, by its monotonic clock. So the newest
    round comes out when the next begins; a GPU whose row has not arrived yet would seem lost.
    """

    def __init__(self) -> None:
        self._num_dropped = 0
        self._nodes: dict[str, _Node] = {}
        self._read: dict[Writer, int] = {}

    def add(self, writer: Writer, node: str, uuid: str, rows: Iterable[HostRow]) -> None:
        """Take rows in, the node's own where ``uuid`` is empty; those of a writer in order."""
        kept = self._nodes.setdefault(node, _Node())
        for row in rows:
            self._read[writer] = row.seq
            waiting = _Waiting(writer, uuid, row)
            if not uuid:
                kept.hosts.append(waiting)
            else:
                kept.gpus.append(waiting)
        excess = len(kept.gpus) - _MOST_SAMPLES
        if excess > 0:
            self._num_dropped += excess
            del kept.gpus[:excess]

    def ready(self, gates: Mapping[str, int]) -> list[Round]:
        """Return the rounds that are whole, by time.

        Args:
            gates: of a node that has rows which were not added yet, the monotonic time up to which
                all have been.
        """
        rounds: list[Round] = []
        for node, kept in self._nodes.items():
            gate = gates.get(node)
            while len(kept.hosts) > 1 and (gate is None or kept.hosts[1].row.monotonic_ns <= gate):
                rounds.append(_next_round(node, kept))
        return sorted(rounds, key=lambda host_round: host_round.time_unix_ns)

    def take_dropped(self) -> int:
        """Return how many rows of GPUs were dropped since it was last asked."""
        num, self._num_dropped = self._num_dropped, 0
        return num

    def done(self) -> dict[Writer, int]:
        """Return the sequence number up to which each writer's rows need not be read again."""
        done = dict(self._read)
        for kept in self._nodes.values():
            for writer, _, row in (*kept.hosts, *kept.gpus):
                done[writer] = min(done[writer], row.seq - 1)
        return done


def _next_round(node: str, kept: _Node) -> Round:
    begin = kept.hosts.popleft().row
    end = kept.hosts[0].row.monotonic_ns
    is_rebooted = end < begin.monotonic_ns
    mine: list[_Waiting] = []
    rest: list[_Waiting] = []
    for waiting in kept.gpus:
        at = waiting.row.monotonic_ns
        belongs = at >= begin.monotonic_ns if is_rebooted else at < end
        (mine if belongs else rest).append(waiting)
    kept.gpus = rest
    gpus = {waiting.uuid: waiting.row.values for waiting in mine}
    return Round(node, begin.time_unix_ns, gpus)


def host_rows(schema: Schema, rows: npt.NDArray[np.void]) -> list[HostRow]:
    """Decode rows of a node, of which the times matter, or of one of its GPUs."""
    columns = []
    for name in GPU_COLUMNS if schema.stream == "gpu" else ():
        values, valid = column_of(schema, rows, name)
        if values.dtype.kind in "fi":
            measured = zip(values.tolist(), valid.tolist(), strict=True)
            columns.append((name, [value if ok else None for value, ok in measured]))
    seqs, at, when = (
        column.astype(np.int64).tolist()
        for column in (
            rows["seq"],
            column_of(schema, rows, "monotonic_ns")[0],
            column_of(schema, rows, "time_unix_ns")[0],
        )
    )
    return [
        HostRow(seqs[i], at[i], when[i], {name: values[i] for name, values in columns})
        for i in range(len(rows))
    ]


__all__ = ["GPU_COLUMNS", "HostRow", "NodeMerger", "Round", "host_rows"]
