"""Writes a rank's data into its journal: steps, layers, scalars, events. Never waits."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter, itemgetter
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, Protocol

from msgspec.structs import replace
from torch import Tensor

from trainer_hooks.exchange.reduce_vector import ReducedNumbers, VerdictFigures
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.host import HostMeasurements, Utilization
from trainer_hooks.measures.sampled import SampledSignals, SignalSampler
from trainer_hooks.tensors.gradients import ALL, layer_of
from trainvitals.catalog import (
    LAYERS_SCHEMA,
    MAX_GROUPS,
    SCALARS_SCHEMA,
    TURN_METRICS,
    steps_schema,
)
from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.io.journal import JournalWriter, StreamWriter
from trainvitals.policy import Judgement
from trainvitals.printable import name_type
from trainvitals.records import EVENT_SCHEMA, Event, FindingRaised, NamesDefined, Note, StepRecord
from trainvitals.rows import Schema, Value

if TYPE_CHECKING:
    from trainer_hooks.measures.noise import NoiseScale

LAYERS_EVERY = 10
"""Steps between rows of layer norms if there is no recent finding."""
STEADY_STEPS = 100
"""Steps with the same number of zero gradients after which another number is written at once: the
experts of a mixture come and go at each step."""
UNUSUAL = 8.0
"""Multiple of the usual gradient norm from which layer norms are written, before any finding."""
LAYERS_AFTER_FINDING = 500
"""Steps after a finding in which layer norms are written at every step."""

_FROM_HOST = {
    "step": "step",
    "attempt": "attempt",
    "time_unix_ns": "time_unix_ns",
    "monotonic_ns": "monotonic_ns",
    "step_duration_seconds": "times.duration",
    "data_wait_seconds": "times.data_wait",
    "monitor_seconds": "times.monitor",
    "forward_backward_seconds": "times.forward_backward",
    "checkpoint_seconds": "times.checkpoint",
    "evaluation_seconds": "times.evaluation",
    "samples_per_second": "samples_per_second",
    "memory_allocated_bytes": "memory.allocated_bytes",
    "memory_peak_bytes": "memory.peak_bytes",
    "memory_alloc_retries": "memory.alloc_retries",
    "memory_ooms": "memory.ooms",
    "memory_estimate_bytes": "memory_estimate_bytes",
    "epoch": "epoch",
    "batch_index": "batch_index",
    "num_batches": "num_batches",
}
"""Columns of each rank, and the fields of ``HostMeasurements`` that provide them."""
_FROM_RECORD = (
    "loss",
    "loss_max",
    "loss_max_rank",
    "grad_norm",
    "loss_limit",
    "grad_norm_limit",
    "skipped",
)
"""Columns that only rank 0 writes, because they are equal on all ranks, and record fields."""


class _StepRow:
    """Collects a step's row: one value per column, in the schema's order."""

    def __init__(self, schema: Schema, *, num_groups: int, is_rank0: bool) -> None:
        self._host_values = attrgetter(*_FROM_HOST.values())
        self._record = attrgetter(*_FROM_RECORD)
        self._is_rank0 = is_rank0
        self._num_groups = num_groups
        rates = ["learning_rate", *(f"learning_rate.{i}" for i in range(1, num_groups))]
        root = (*_FROM_RECORD, "lr_factor", "grad_norm_clipped", *rates) if is_rank0 else ()
        fixed = (*_FROM_HOST, *root)
        self._others = [c.name for c in schema.columns if c.name not in fixed]
        position = {name: i for i, name in enumerate((*fixed, *self._others))}
        order = (position[c.name] for c in schema.columns)
        self._in_order: Callable[..., tuple[Value, ...]] = itemgetter(*order)

    def of(
        self, measured: HostMeasurements, record: StepRecord, extra: Mapping[str, Value]
    ) -> tuple[Value, ...]:
        """Return the values of a step's row; a value that no source provides is missing."""
        others = map(extra.get, self._others)
        if not self._is_rank0:
            return self._in_order((*self._host_values(measured), *others))
        factor, clipped = measured.lr_factor, record.grad_norm
        limit = measured.auto_max_norm if measured.clips_automatically else measured.max_norm
        if clipped is not None and limit is not None and clipped > limit:
            clipped = limit
        if measured.norm_after_clip is not None:
            clipped = measured.norm_after_clip
        if measured.clip_unknown:
            clipped = None
        known = measured.learning_rates[: self._num_groups]
        rates = [None if rate is None else rate * factor for rate in known]
        rates += [None] * (self._num_groups - len(rates))  # of groups that the loop has removed
        own = (*self._host_values(measured), *self._record(record), factor, clipped)
        return self._in_order((*own, *rates, *others))


_Given = ParamSpec("_Given")


_MAX_REFUSED = 100
"""Maximum number of scalars with invalid values that the run's events report by name."""


def not_a_number(name: str, value: object) -> UsageError:
    """Return the error for a scalar that a rank cannot write because it is not a number."""
    shape = getattr(value, "shape", None)
    shown = name_type(value) + (f" of shape {tuple(shape)}" if shape is not None else "")
    return UsageError(
        f"{name} is {shown}; a scalar must be one number, so it was not recorded",
        hint="pass one number, such as value.mean(); leave None out",
    )


def _fail_open_write(
    method: Callable[Concatenate[Emitter, _Given], None],
) -> Callable[Concatenate[Emitter, _Given], None]:
    """Make a method fail open, and delay a signal handler's call to its end in the main thread.

    A wrapper instead of ``with``, which would cost as much as packing a row.
    """
    where = f"journal.{method.__name__}"

    @wraps(method)
    def write(emitter: Emitter, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        in_main = get_ident() == emitter._main_thread
        emitter._depth += in_main
        try:
            method(emitter, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - FaultCounter.fail_open, written out
            emitter._faults.count(where, error)
        finally:
            emitter._depth -= in_main
            if emitter._put_off is not None and in_main:
                emitter._make_put_off_call()

    return write


class JournalObserver(Protocol):
    """Sees what a rank writes: custom alerts judge it. Its methods fail open."""

    def observe_row(self, step: int, attempt: int, row: Sequence[Value]) -> None:
        """Use a step's row as the rank writes it, in the order of ``Emitter.columns``."""

    def observe_scalar(self, name: str, value: float, *, step: int, attempt: int) -> None:
        """Process a scalar that the loop recorded, when the rank writes it."""


class ScalarObserver(Protocol):
    """Judges each scalar on the rank that recorded it, also without a journal."""

    def __call__(self, name: str, value: float, *, step: int, attempt: int) -> None:
        """Judge one scalar that the loop recorded; must not raise."""


class Emitter:
    """The only output of a rank. Every method fails open."""

    def __init__(
        self,
        journal: JournalWriter | None,
        *,
        clock: Clock,
        faults: FaultCounter,
        is_rank0: bool,
        num_groups: int,
        layers: LayerAggregator,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._faults = faults
        self._is_rank0 = is_rank0
        self._layers = layers
        self._streams: dict[str, StreamWriter] = {}
        self.num_groups = num_groups
        num_groups = min(num_groups, MAX_GROUPS)
        schema = steps_schema(num_groups=num_groups)
        self._steps = None if journal is None else journal.open_stream(schema)
        self.columns = tuple(column.name for column in schema.columns)
        self.observer: JournalObserver | None = None
        """Gets every row and scalar that is written here."""
        self._scalar_observers: tuple[ScalarObserver, ...] = ()
        self._row = _StepRow(schema, num_groups=num_groups, is_rank0=is_rank0)
        self._scalar_ids: dict[str, int] = {}
        self._refused_scalars: set[str] = set()
        self._layers_until = -1
        self._layers_at: dict[int, int] = {}
        """Per optimizer turn, the tenth of steps in which its layers were last written."""
        self._zeros: dict[int, tuple[int, int]] = {}
        """Per turn, the number of gradients that are exactly 0, and the step since which it is."""
        self._usual_norms: dict[int, float] = {}
        """Per turn, the running mean of the gradient norm, which no single step moves much."""
        self._turn = 0
        """Turn of the previous step."""
        self._layers_named = False
        self._depth = 0
        self._main_thread = threading.main_thread().ident
        self._put_off: Callable[[], None] | None = None
        self._dropped = 0
        self._told: OSError | None = None

    def add_scalar_observer(self, observe: ScalarObserver) -> None:
        """Pass each scalar that this rank records to ``observe`` too, which must not raise."""
        self._scalar_observers = (*self._scalar_observers, observe)

    @property
    def incarnation(self) -> str:
        """Return the incarnation of the rank's journal; empty without a journal."""
        return "" if self._journal is None else self._journal.identity.incarnation

    @property
    def directory(self) -> Path | None:
        """Return the directory of the rank's journal; None without a journal."""
        return None if self._journal is None else self._journal.directory

    def defer_call(self, call: Callable[[], None]) -> bool:
        """Make ``call`` after the rank's current write in the main thread; return False if none."""
        if self._depth:
            self._put_off = call
        return self._depth > 0

    def _make_put_off_call(self) -> None:
        """Make the call that ``defer_call`` delayed, once the rank's write has ended."""
        if not self._depth and self._put_off is not None:
            call, self._put_off = self._put_off, None
            call()

    def _get_or_open_stream(self, schema: Schema) -> StreamWriter | None:
        """Return the journal's stream for a rank's rows, opened at first use; None: no journal."""
        stream = self._streams.get(schema.stream)
        if stream is None and self._journal is not None:
            stream = self._streams[schema.stream] = self._journal.open_stream(schema)
        return stream

    @_fail_open_write
    def event(self, event: Event, *, step: int, attempt: int) -> None:
        """Write an event to this rank's journal."""
        stream = self._get_or_open_stream(EVENT_SCHEMA)
        if stream is not None:
            stream.append_event(
                event,
                step=step,
                attempt=attempt,
                time_unix_ns=self._clock.time_ns(),
                monotonic_ns=self._clock.monotonic_ns(),
            )

    def run_event(self, event: Event, *, step: int, attempt: int) -> None:
        """Write an event that all ranks know, on rank 0 only."""
        if self._is_rank0:
            self.event(event, step=step, attempt=attempt)

    def note(
        self,
        code: str,
        text: str,
        severity: Literal["info", "warning", "error"] = "info",
        *,
        step: int,
        attempt: int,
    ) -> None:
        """Report a note about the run once: rank 0 writes it."""
        self.run_event(Note(code=code, text=text, severity=severity), step=step, attempt=attempt)

    @_fail_open_write
    def scalars(self, values: Mapping[str, float], *, step: int, attempt: int) -> None:
        """Write user-named scalars; a new name is defined by an event first."""
        stream = self._get_or_open_stream(SCALARS_SCHEMA)
        if stream is None and not self._scalar_observers:
            return
        head = [step, attempt, self._clock.time_ns(), self._clock.monotonic_ns()]
        for name, value in values.items():
            number = self._number(name, value, step=step, attempt=attempt)
            if number is None:
                continue
            for observe in self._scalar_observers:
                observe(name, number, step=step, attempt=attempt)
            if stream is None:
                continue
            if name not in self._scalar_ids:
                new = self._scalar_ids[name] = len(self._scalar_ids)
                names = NamesDefined(stream="scalars", names={new: name})
                self.event(names, step=step, attempt=attempt)
            stream.append([*head, self._scalar_ids[name], number])
            if self.observer is not None:
                self.observer.observe_scalar(name, number, step=step, attempt=attempt)

    def _number(self, name: str, value: object, *, step: int, attempt: int) -> float | None:
        """Return a user's scalar as a number to write; count and report an invalid one."""
        try:
            # Torch warns about a number that is taken from a tensor with gradients.
            plain = value.detach() if isinstance(value, Tensor) else value
            return float(plain)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - a third-party __float__ may raise anything
            refusal = not_a_number(name, value)
            self._faults.count("scalars", refusal)
            if name not in self._refused_scalars and len(self._refused_scalars) < _MAX_REFUSED:
                self._refused_scalars.add(name)
                text = f"{refusal.text} ({type(error).__name__}); {refusal.hint}"
                note = Note(code="not_a_number", text=text, severity="warning")
                self.event(note, step=step, attempt=attempt)
            return None

    def step(
        self, measured: HostMeasurements, record: StepRecord, extra: Mapping[str, Value]
    ) -> None:
        """Write the rank's row of one step; rank 0 adds the numbers that are equal on all ranks.

        ``_fail_open_write`` is inlined here: its call would add a tenth to the cost of a row.
        """
        stream = self._steps
        if stream is None:
            return
        in_main = get_ident() == self._main_thread
        self._depth += in_main
        try:
            if stream.dropped != self._dropped:
                self._count_journal_errors(stream)
            row = self._row.of(measured, record, extra)
            stream.append(row)
            if self.observer is not None:
                self.observer.observe_row(measured.step, measured.attempt, row)
        except Exception as error:  # noqa: BLE001 - as in _writes
            self._faults.count("journal.step", error)
        finally:
            self._depth -= in_main
            if self._put_off is not None and in_main:
                self._make_put_off_call()

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return the names of the layers in a rank's rows, by their ids."""
        return self._layers.names

    def follow_layers(self, layers: LayerAggregator) -> None:
        """Write the rows of these layers from now on; known layers must have the same ids."""
        self._layers, self._layers_named = layers, False

    @_fail_open_write
    def layers(
        self,
        measured: HostMeasurements,
        reduced: ReducedNumbers,
        samples: SampledSignals | None,
        *,
        norm: float | None,
        has_finding: bool,
    ) -> None:
        """Write the layers stream on rank 0: each tenth step, near findings, if sampled.

        Also at a step whose norm is unusual, and when a gradient becomes 0: so the layer is known
        in which it began, and the step.
        Each of several optimizers that alternate has its own first step in every ten: the run's
        tenth step could always belong to the same optimizer.
        """
        if has_finding:
            self._layers_until = measured.step + LAYERS_AFTER_FINDING
        turn, before, self._turn = measured.turn, self._turn, measured.turn
        due = not measured.step % LAYERS_EVERY or measured.step <= self._layers_until
        if turn:
            tenth = measured.step // LAYERS_EVERY
            due |= self._layers_at.get(turn) != tenth
            self._layers_at[turn] = tenth
        squares = None if measured.after_clip else reduced.squares
        due |= self._is_rank0 and norm is not None and self._is_unusual(turn, norm)
        if self._is_rank0 and squares is not None:
            num, since = self._zeros.get(turn, (-1, measured.step))
            if (zeros := squares.count(0.0)) != num:
                due |= measured.step - since >= STEADY_STEPS
                self._zeros[turn] = zeros, measured.step
        if not self._is_rank0 or not (due or (samples is not None and samples.by_layer)):
            return
        stream = self._get_or_open_stream(LAYERS_SCHEMA)
        if stream is None:
            return
        if not self._layers_named:
            names = dict(enumerate(self._layers.names))
            self._layers_named = True
            event = NamesDefined(stream="layers", names=names)
            self.event(event, step=measured.step, attempt=measured.attempt)
        head = [measured.step, measured.attempt, measured.time_unix_ns, measured.monotonic_ns]
        for row in self._layers.rows(squares, samples, turn=turn, before=before):
            stream.append([*head, *row])

    def _is_unusual(self, turn: int, norm: float) -> bool:
        """Return whether a gradient norm is large, so that its row of layers is written."""
        usual = self._usual_norms.get(turn, 0.0)
        if not (math.isfinite(norm) and usual):
            self._usual_norms[turn] = norm if math.isfinite(norm) else usual
            return False
        self._usual_norms[turn] = usual + (min(norm, 2.0 * usual) - usual) / 16
        return norm > UNUSUAL * usual

    def _count_journal_errors(self, stream: StreamWriter) -> None:
        """Count each error that made a rank's journal drop rows once: it reports nothing."""
        self._dropped, error = stream.dropped, stream.journal.last_error
        if error is not None and error is not self._told:
            self._told = error
            self._faults.count("journal.full", error)

    @_fail_open_write
    def close(self) -> None:
        """Close the rank's journal; written rows stay for the agent."""
        if self._journal is not None:
            self._journal.close()


@dataclass(slots=True)
class TokenCount:
    """Tokens of all ranks, over all attempts of the run."""

    seen: int = 0
    """Tokens consumed: a rollback does not return them."""
    trained: int = 0
    """Tokens used in updates of the current attempt."""

    def restore_counts(self, to: TokenCount) -> None:
        """Restore the token counts of the ranks' rows to those of a restored state."""
        self.trained, self.seen = to.trained, max(self.seen, to.seen)


class StepLog:
    """Writes all data of a step whose numbers have been read back, and counts its tokens.

    ``columns`` are added to the record's on rank 0.
    """

    def __init__(
        self, emitter: Emitter, columns: Rank0Columns, faults: FaultCounter, *, is_rank0: bool
    ) -> None:
        self._emitter = emitter
        self._columns = columns
        self._faults = faults
        self._is_rank0 = is_rank0
        self.tokens = TokenCount()

    def count_parameters(self, num_parameters: int) -> None:
        """Use the number of trained parameters for the utilization of the steps from now on."""
        self._columns.utilization.count_parameters(num_parameters)

    def write(
        self,
        measured: HostMeasurements,
        record: StepRecord,
        reduced: ReducedNumbers,
        derived: VerdictFigures,
        samples: SampledSignals | None,
        judgement: Judgement,
        name: str = "",
        columns: Mapping[str, Value] = MappingProxyType({}),
    ) -> dict[str, Value]:
        """Write the row, the layers' rows, changes, and findings; return the row's own columns.

        ``columns`` come from features.

        ``name`` is the name of an optimizer that was stepped alone. Its numbers are written as
        scalars, such as ``loss/generator``; the first optimizer's numbers are the run's as well.
        """
        of_run = measured.turn <= 1
        tokens = measured.tokens
        if tokens is None:
            tokens = _tokens_from_weights(measured, reduced)
        if not of_run:
            tokens = None  # all optimizers train on the first one's batches: count a token once
        if tokens is not None:
            self.tokens.seen += tokens
            self.tokens.trained += 0 if record.skipped else tokens
        losses = reduced.losses()
        extra: dict[str, Value] = {"rank_loss": losses[reduced.layout.rank], **columns}
        with self._faults.fail_open("columns"):
            extra["communication_seconds"] = measured.communication_seconds()
            extra["optimizer_seconds"] = measured.times.optimizer
            extra |= measured.section_columns()
            if samples is not None:
                extra["rank_grad_norm"] = samples.own_grad_norm
                extra["reduction_error"] = samples.reduction_error
            if self._is_rank0:
                extra |= self._columns.of(measured, record, derived, losses, samples, tokens)
                if tokens is not None:
                    extra["tokens_seen"] = self.tokens.seen
                    extra["tokens_trained"] = self.tokens.trained
        emitter, step, attempt = self._emitter, measured.step, measured.attempt
        norm = record.grad_norm
        if name:
            if self._is_rank0:
                emitter.scalars(_optimizer_scalars(record, name), step=step, attempt=attempt)
            if not of_run:
                record = replace(
                    record,
                    loss=None,
                    loss_max=None,
                    loss_max_rank=-1,
                    grad_norm=None,
                    loss_limit=None,
                    grad_norm_limit=None,
                )
                extra |= dict.fromkeys(_OF_THE_RUN)
        emitter.step(measured, record, extra)
        has_finding = bool(judgement.findings)
        emitter.layers(measured, reduced, samples, norm=norm, has_finding=has_finding)
        for change in measured.changes:
            emitter.scalars(change.numbers(), step=step, attempt=attempt)
            if change.is_told:
                text = f"group {change.group}: {change.key} {change.before} -> {change.after}"
                emitter.note("group_setting", text, step=step, attempt=attempt)
        if measured.flops is not None:
            text = f"{measured.flops:.6g} FLOPs were counted in this step on rank 0"
            emitter.note("flops", text, step=step, attempt=attempt)
        for finding in judgement.findings:
            emitter.run_event(FindingRaised(finding=finding), step=step, attempt=attempt)
        return extra

    def write_readings(self, measured: HostMeasurements, judgement: Judgement) -> None:
        """Write what the probe read for a judgement; after everything else about the step."""
        for reading in judgement.readings:
            self._emitter.run_event(reading, step=measured.step, attempt=measured.attempt)


_OF_THE_RUN = ("rank_loss", "loss_spread")
"""Columns outside the record that are missing if the step is not the first optimizer's."""


def _optimizer_scalars(record: StepRecord, name: str) -> dict[str, float]:
    """Return an optimizer's numbers of a step as scalars that rank 0 writes."""
    numbers = ((key, getattr(record, key)) for key in TURN_METRICS)
    return {f"{key}/{name}": float(value) for key, value in numbers if value is not None}


def _tokens_from_weights(measured: HostMeasurements, reduced: ReducedNumbers) -> int | None:
    """Return a step's tokens from the loss weights that the ranks summed; None without weights."""
    total = reduced.total("weight")
    return int(total) if measured.weighted and math.isfinite(total) else None


# ----------------------------------------------------------------------- rows of layers


class LayerAggregator:
    """Adds up squares by layer, a parameter's name without its last part; modules may be added."""

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[str] = (),
        parts: Sequence[slice] = (ALL,),
        *,
        first_layers: Sequence[str] = (),
    ) -> None:
        """``first_layers``: layers that keep their ids, which are their positions."""
        self._parts = parts
        owners = [layer_of(name) for name in names]
        self.names = tuple(dict.fromkeys((*first_layers, *owners, *modules)))
        position = {name: i for i, name in enumerate(self.names)}
        self._owner = [position[owner] for owner in owners]
        self._owners = frozenset(self._owner)
        self._num_layers = max(self._owner) + 1

    def norms(self, squares: Sequence[float], part: slice = ALL) -> list[float | None]:
        """Return, for layers' rows, the L2 norm of each layer that has parameters in ``part``."""
        sums: list[float | None] = [None] * self._num_layers
        for owner, square in zip(self._owner[part], squares[part], strict=True):
            sums[owner] = (sums[owner] or 0.0) + square
        return [None if s is None else math.sqrt(s) if s >= 0 else math.nan for s in sums]

    def _largest_changes(self, changes: Sequence[float] | None) -> list[float] | None:
        """Return, for the rows of layers with parameters, the largest change of any parameter."""
        if changes is None:
            return None
        worst = [0.0] * self._num_layers
        for owner, change in zip(self._owner, changes, strict=True):
            worst[owner] = max(worst[owner], change)
        return worst

    def rows(
        self,
        grad_squares: Sequence[float] | None,
        samples: SampledSignals | None,
        *,
        turn: int = 0,
        before: int = 0,
    ) -> Iterator[list[Value]]:
        """Yield the id and the values of each layer with values, in the order of LAYER_METRICS.

        Without squares the gradients' norms are missing. If optimizers alternate, only the
        parameters of one have gradients in the step (``turn``), and only those of the previous one
        (``before``) have an update.
        """
        samples = samples or SampledSignals()
        squares = (grad_squares, samples.weight_squares, samples.update_squares)
        parts = (self._parts[turn], ALL, self._parts[before])
        by_layer = [
            None if s is None else self.norms(s, of) for s, of in zip(squares, parts, strict=True)
        ]
        writes = [self._largest_changes(w) for w in (samples.weight_writes, samples.moment_writes)]
        damaged_layers = set(map(layer_of, samples.nonfinite_parameters))
        peaks = sorted(samples.huge_parameters.items(), key=lambda pair: pair[1])
        huge_weights = {layer_of(name): peak for name, peak in peaks}
        for layer, name in enumerate(self.names):
            has_parameters = layer in self._owners
            norms = [norms[layer] if norms and has_parameters else None for norms in by_layer]
            if name in damaged_layers:
                norms[1] = math.nan  # the weight norm, also in a step that does not sample it
            elif name in huge_weights:
                norms[1] = max(norms[1] or 0.0, huge_weights[name])
            activation = samples.activations.get(name, (None, None, None))
            written = [worst[layer] if worst and has_parameters else None for worst in writes]
            if any(value is not None for value in (*norms, activation[0], *written)):
                yield [layer, *norms, *activation, *written]


# --------------------------------------------------------------------- rank 0's columns


_OVERFLOW_WINDOW = 100
_LARGEST_LOSS = 700.0
"""Largest loss for which e^loss fits in a float64."""


class Rank0Columns:
    """Keeps values that span several steps: overflows, utilization, the noise scale."""

    def __init__(
        self, utilization: Utilization, sampler: SignalSampler | None, world_size: int
    ) -> None:
        self.utilization = utilization
        self._overflows = 0
        self._recent: deque[bool] = deque(maxlen=_OVERFLOW_WINDOW)
        self._noise: NoiseScale | None = None
        if sampler is not None and sampler.settings.noise_scale:
            from trainer_hooks.measures.noise import NoiseScale

            self._noise = NoiseScale(world_size)

    def of(
        self,
        measured: HostMeasurements,
        record: StepRecord,
        derived: VerdictFigures,
        losses: list[float | None],
        samples: SampledSignals | None,
        tokens: int | None,
    ) -> dict[str, Value]:
        """Return rank 0's additional columns of the steps stream; call once per step."""
        if measured.flops is not None:
            self.utilization.use_counted_flops(measured.flops, tokens)
        seconds = measured.times.duration
        columns: dict[str, Value] = {
            "verdict": derived.verdict_column(record),
            "culprit_rank": _culprit(record),
            "nonfinite_params": record.nonfinite_params,
            "tokens_per_second": tokens / seconds if tokens is not None and seconds else None,
            "mfu_ratio": self.utilization.ratio(tokens, seconds),
            "loss_spread": _spread(losses),
            "max_norm": None if measured.clip_unknown else measured.max_norm,
            "auto_max_norm": measured.auto_max_norm,
            "weight_decay": measured.weight_decay,
        }
        if tokens is not None and record.loss is not None:
            columns["perplexity"] = math.exp(min(record.loss, _LARGEST_LOSS))
        if derived.loss_scale == derived.loss_scale:
            columns |= self._loss_scale_columns(derived.loss_scale, record.overflow)
        if samples is not None and samples.weight_squares is not None:
            columns |= _weight_update_columns(samples)
        if self._noise is not None and samples is not None and samples.local_square is not None:
            columns |= self._noise_columns(self._noise, record, samples.local_square, tokens)
        return columns

    def _loss_scale_columns(self, loss_scale: float, overflow: bool) -> dict[str, Value]:
        """Return rank 0's columns of a step about the gradient scaler: scale and overflows."""
        self._overflows += overflow
        self._recent.append(overflow)
        return {
            "loss_scale": loss_scale,
            "overflow_steps": self._overflows,
            "overflow_ratio": sum(self._recent) / len(self._recent),
        }

    def _noise_columns(
        self, noise: NoiseScale, record: StepRecord, local_square: float, tokens: int | None
    ) -> dict[str, Value]:
        """Return rank 0's columns of a step about the noise scale; None while it is unknown."""
        if record.grad_norm is not None and not record.failed_ranks and not record.overflow:
            noise.add(small_square=local_square, big_square=record.grad_norm**2)
        ratio = noise.ratio()
        is_known = ratio is not None and tokens is not None
        return {
            "noise_scale_ratio": ratio,
            "critical_batch_tokens": ratio * tokens if is_known else None,  # type: ignore[operator]
        }


def _culprit(record: StepRecord) -> int:
    """Return the one rank that made the step of a row bad; -1 if there is none, or several."""
    if record.nonfinite_ranks:
        return record.nonfinite_ranks[0] if len(record.nonfinite_ranks) == 1 else -1
    return record.nonfinite_state_rank if record.nonfinite_state else record.replica_rank


def _spread(losses: list[float | None]) -> float | None:
    """Return a row's largest minus smallest loss; None for one rank, or if a loss is NaN."""
    if len(losses) < 2:
        return None
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return max(finite) - min(finite) if len(finite) == len(losses) else None


def _weight_update_columns(samples: SampledSignals) -> dict[str, Value]:
    """Return the columns of a step's row about the norms of weights and their update."""
    assert samples.weight_squares is not None, "asked for where it was measured"
    weight = _norm_from_squares(samples.weight_squares)
    if samples.update_squares is None:
        return {"weight_norm": weight}
    update = _norm_from_squares(samples.update_squares)
    ratio = update / weight if weight else None
    return {"weight_norm": weight, "update_norm": update, "update_ratio": ratio}


def _norm_from_squares(squares: Sequence[float]) -> float:
    """Return the L2 norm for a row from squared norms of parameters; NaN if invalid."""
    total = sum(squares)
    return math.sqrt(total) if total >= 0 else math.nan
