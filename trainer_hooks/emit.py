"""Writes what a rank saw into its journal: steps, layers, scalars, events. Never waits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from trainer_hooks.failopen import FaultCounter
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


class Layers:
    """Adds up squares by layer: a parameter's name without its last part."""

    def __init__(self, names: Sequence[str]) -> None:
        owners = [name.rpartition(".")[0] or name for name in names]
        self.names = tuple(dict.fromkeys(owners))
        position = {name: i for i, name in enumerate(self.names)}
        self._owner = [position[owner] for owner in owners]

    def norms(self, squares: Sequence[float]) -> list[float]:
        """Return the L2 norm of each layer's gradients."""
        sums = [0.0] * len(self.names)
        for owner, square in zip(self._owner, squares, strict=True):
            sums[owner] += square
        return [math.sqrt(s) if s >= 0 else math.nan for s in sums]


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
        self._scalar_ids: dict[str, int] = {}
        self._layers_until = -1
        self._layers_named = False
        self._depth = 0
        self._put_off: Callable[[], None] | None = None
        self._told: OSError | None = None

    @contextmanager
    def _writing(self, where: str) -> Iterator[None]:
        """Fail open, and let a signal wait for the end of a write that the main thread is in."""
        if threading.current_thread() is not threading.main_thread():
            with self._faults.fail_open(where):
                yield
            return
        self._depth += 1
        try:
            with self._faults.fail_open(where):
                yield
        finally:
            self._depth -= 1
            if self._put_off is not None and not self._depth:
                call, self._put_off = self._put_off, None
                call()

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
            values: dict[str, Value] = {
                "step": host.step,
                "attempt": host.attempt,
                "time_unix_ns": host.time_unix_ns,
                "monotonic_ns": host.monotonic_ns,
                "step_duration_seconds": host.duration_seconds,
                "data_wait_seconds": host.data_wait_seconds,
                "monitor_seconds": host.monitor_seconds,
                "memory_allocated_bytes": host.memory_allocated_bytes,
                "memory_peak_bytes": host.memory_peak_bytes,
                "epoch": host.epoch,
                "batch_index": host.batch_index,
            }
            if self._is_root:
                values.update(_reduced_values(host, record))
            values.update(extra)
            stream.append([values.get(c.name) for c in self._steps_schema.columns])

    def layers(self, host: HostStep, reduced: Reduced, *, found: bool) -> None:
        """Write layer norms on rank 0: every tenth step, and each step near a finding."""
        if found:
            self._layers_until = host.step + LAYERS_AFTER_FINDING
        if not self._is_root or (host.step % LAYERS_EVERY and host.step > self._layers_until):
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
            for layer, norm in enumerate(self._layers.norms(reduced.squares)):
                stream.append([*head, layer, norm])

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


def _reduced_values(host: HostStep, record: StepRecord) -> dict[str, Value]:
    rates = host.learning_rates
    first = rates[0]
    norm = record.grad_norm
    clipped = norm
    if norm is not None and host.max_norm is not None and norm > host.max_norm:
        clipped = host.max_norm
    values: dict[str, Value] = {
        "loss": record.loss,
        "loss_max": record.loss_max,
        "loss_max_rank": record.loss_max_rank,
        "grad_norm": norm,
        "grad_norm_clipped": clipped,
        "loss_limit": record.loss_limit,
        "grad_norm_limit": record.grad_norm_limit,
        "learning_rate": None if first is None else first * host.lr_factor,
        "lr_factor": host.lr_factor,
        "skipped": int(record.skipped),
    }
    for group, rate in enumerate(rates[1:], start=1):
        values[f"learning_rate.{group}"] = None if rate is None else rate * host.lr_factor
    return values
