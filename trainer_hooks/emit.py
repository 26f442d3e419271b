"""Writes what a rank saw into its journal: steps, layers, scalars, events. Never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import TracebackType

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.layers import Layers
from trainer_hooks.measures.sampled import Samples
from trainer_hooks.pack import Reduced
from trainer_hooks.signals import HostStep
from trainvitals.catalog import LAYERS_SCHEMA, SCALARS_SCHEMA, steps_schema
from trainvitals.clock import Clock
from trainvitals.io.journal import JournalWriter, StreamWriter
from trainvitals.records import EVENT_SCHEMA, Event, NamesDefined, StepRecord
from trainvitals.rows import Schema, Value

LAYERS_EVERY = 10
"""Steps between rows of layer norms, far from any finding."""
LAYERS_AFTER_FINDING = 500
"""Steps after a finding in which layer norms are written at every step."""

_FROM_HOST = {
    "step": "step",
    "attempt": "attempt",
    "time_unix_ns": "time_unix_ns",
    "monotonic_ns": "monotonic_ns",
    "step_duration_seconds": "duration_seconds",
    "data_wait_seconds": "data_wait_seconds",
    "monitor_seconds": "monitor_seconds",
    "forward_backward_seconds": "forward_backward_seconds",
    "optimizer_seconds": "optimizer_seconds",
    "samples_per_second": "samples_per_second",
    "memory_allocated_bytes": "memory_allocated_bytes",
    "memory_peak_bytes": "memory_peak_bytes",
    "memory_alloc_retries": "memory_alloc_retries",
    "memory_ooms": "memory_ooms",
    "memory_estimate_bytes": "memory_estimate_bytes",
    "epoch": "epoch",
    "batch_index": "batch_index",
}
"""Columns that a field of ``HostStep`` goes into."""
_FROM_RECORD = (
    "loss",
    "loss_max",
    "loss_max_rank",
    "grad_norm",
    "loss_limit",
    "grad_norm_limit",
    "skipped",
)
"""Columns that a field of ``StepRecord`` of the same name goes into, on rank 0."""
_OF_HOST = attrgetter(*_FROM_HOST.values())
_OF_RECORD = attrgetter(*_FROM_RECORD)


class _StepColumns:
    """Brings a step's numbers into the order of the schema's columns.

    Everything that is the same at each step was found out before: a row is gathered and put into
    order by calls that take it as a whole.
    """

    def __init__(self, schema: Schema, *, num_groups: int, is_root: bool) -> None:
        self._is_root = is_root
        given = [*_FROM_HOST, *(_reduced_columns(num_groups) if is_root else ())]
        self._others = [c.name for c in schema.columns if c.name not in given]
        position = {name: i for i, name in enumerate([*given, *self._others])}
        self._order = itemgetter(*(position[c.name] for c in schema.columns))

    def row(
        self, host: HostStep, record: StepRecord, extra: Mapping[str, Value]
    ) -> Sequence[Value]:
        """Return one value per column; ``extra`` is asked for what neither of the others has."""
        reduced = _reduced_values(host, record) if self._is_root else ()
        row: Sequence[Value] = self._order(
            (*_OF_HOST(host), *reduced, *map(extra.get, self._others))
        )
        return row


class _Writing:
    """A write under way: of ours a fault goes no further, and a signal's handler waits."""

    __slots__ = ("_emitter", "_fail_open", "_in_main")

    def __init__(self, emitter: Emitter, where: str) -> None:
        self._emitter = emitter
        self._fail_open = emitter._faults.fail_open(where)
        self._in_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        self._emitter._depth += self._in_main

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        emitter = self._emitter
        try:
            return self._fail_open.__exit__(kind, error, trace)
        finally:
            emitter._depth -= self._in_main
            if emitter._put_off is not None and self._in_main and not emitter._depth:
                call, emitter._put_off = emitter._put_off, None
                call()


class Emitter:
    """The one way out of a rank. Every method fails open."""

    def __init__(
        self,
        journal: JournalWriter | None,
        *,
        clock: Clock,
        faults: FaultCounter,
        is_root: bool,
        num_groups: int,
        layers: Layers,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._faults = faults
        self._is_root = is_root
        self._layers = layers
        self._streams: dict[str, StreamWriter] = {}
        self._steps_schema = steps_schema(num_groups=num_groups)
        self._steps = _StepColumns(self._steps_schema, num_groups=num_groups, is_root=is_root)
        self._scalar_ids: dict[str, int] = {}
        self._layers_until = -1
        self._layers_named = False
        self._depth = 0
        self._put_off: Callable[[], None] | None = None
        self._told: OSError | None = None

    def _writing(self, where: str) -> _Writing:
        """Fail open, and let a signal wait for the end of a write that the main thread is in."""
        return _Writing(self, where)

    def put_off(self, call: Callable[[], None]) -> bool:
        """Make ``call`` after the write the main thread is in; False where it is in none."""
        if self._depth:
            self._put_off = call
        return self._depth > 0

    def _stream(self, schema: Schema) -> StreamWriter | None:
        stream = self._streams.get(schema.stream)
        if stream is None and self._journal is not None:
            stream = self._streams[schema.stream] = self._journal.open_stream(schema)
        return stream

    def event(self, event: Event, *, step: int, attempt: int) -> None:
        """Write an event."""
        with self._writing("journal.event"):
            stream = self._stream(EVENT_SCHEMA)
            if stream is not None:
                stream.append_event(
                    event,
                    step=step,
                    attempt=attempt,
                    time_unix_ns=self._clock.time_ns(),
                    monotonic_ns=self._clock.monotonic_ns(),
                )

    def scalars(self, values: Mapping[str, float], *, step: int, attempt: int) -> None:
        """Write user-named scalars; a new name is defined by an event first."""
        with self._writing("journal.scalars"):
            stream = self._stream(SCALARS_SCHEMA)
            if stream is None:
                return
            head = [step, attempt, self._clock.time_ns(), self._clock.monotonic_ns()]
            for name, value in values.items():
                if name not in self._scalar_ids:
                    new = self._scalar_ids[name] = len(self._scalar_ids)
                    names = NamesDefined(stream="scalars", names={new: name})
                    self.event(names, step=step, attempt=attempt)
                stream.append([*head, self._scalar_ids[name], float(value)])

    def step(self, host: HostStep, record: StepRecord, extra: Mapping[str, Value]) -> None:
        """Write the rank's row of one step; rank 0 adds the numbers that are equal on all ranks."""
        with self._writing("journal.step"):
            stream = self._stream(self._steps_schema)
            if stream is None:
                return
            self._tell_losses()
            stream.append(self._steps.row(host, record, extra))

    def layers(self, host: HostStep, reduced: Reduced, samples: Samples, *, found: bool) -> None:
        """Write the layers' rows on rank 0: every tenth step, near a finding, and when sampled."""
        if found:
            self._layers_until = host.step + LAYERS_AFTER_FINDING
        due = not host.step % LAYERS_EVERY or host.step <= self._layers_until
        if not self._is_root or not (due or samples.by_layer):
            return
        with self._writing("journal.layers"):
            stream = self._stream(LAYERS_SCHEMA)
            if stream is None:
                return
            if not self._layers_named:
                names = dict(enumerate(self._layers.names))
                self._layers_named = True
                event = NamesDefined(stream="layers", names=names)
                self.event(event, step=host.step, attempt=host.attempt)
            head = [host.step, host.attempt, host.time_unix_ns, host.monotonic_ns]
            for row in self._layers.rows(reduced.squares, samples):
                stream.append([*head, *row])

    def _tell_losses(self) -> None:
        """Raise what made the journal drop rows, once each: it counts them, and says nothing."""
        assert self._journal is not None
        error = self._journal.last_error
        if error is not None and error is not self._told:
            self._told = error
            with self._faults.fail_open("journal.full"):
                raise error

    def close(self) -> None:
        """Close the journal; what was written stays for the agent."""
        with self._writing("journal.close"):
            if self._journal is not None:
                self._journal.close()


def _reduced_columns(num_groups: int) -> tuple[str, ...]:
    rates = ("learning_rate", *(f"learning_rate.{i}" for i in range(1, num_groups)))
    return (*_FROM_RECORD, "grad_norm_clipped", "lr_factor", *rates)


def _reduced_values(host: HostStep, record: StepRecord) -> tuple[Value, ...]:
    clipped, limit = record.grad_norm, host.max_norm
    if clipped is not None and limit is not None and clipped > limit:
        clipped = limit
    factor = host.lr_factor
    rates = [None if rate is None else rate * factor for rate in host.learning_rates]
    return (*_OF_RECORD(record), clipped, factor, *rates)
