"""Data position of a training loop: current batch, skipped windows, samples of each step.

Which samples fed each step on this rank is recorded for a while, and reported for each bad step.
This fails open: errors are counted, and never stop or block training.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, Literal, SupportsIndex

import torch

from trainer_hooks.data.loader import (
    Batches,
    BatchIndex,
    BatchPosition,
    DataState,
    LoadedBatch,
    convert_window,
)
from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.features.probe import ProbeFeature
from trainer_hooks.features.replicas import ReplicasFeature
from trainer_hooks.guard.schedules import SchedulerStepper
from trainer_hooks.probe.probe import LossOf
from trainer_hooks.recovery.manager import Restored
from trainer_hooks.recovery.replicas import NO_ORDER
from trainer_hooks.repro.capsule import AutocastSetting, CapsuleContext, Content
from trainer_hooks.repro.data_writer import BadStep, DataWriter
from trainer_hooks.step.context import RunContext
from trainvitals.errors import UsageError
from trainvitals.identity import new_incarnation
from trainvitals.io.capsules import FOLDER
from trainvitals.io.sample_ids import StepSamples
from trainvitals.policy import Judgement
from trainvitals.policy.plan import BatchWindow
from trainvitals.printable import name_type
from trainvitals.records import BatchNoted, DataWindowSkipped, Decision

AfterRollback = Literal["move_on", "replay"]
_MOST_WAITING = 4096
"""Batches recorded until a step claims them; positions only, not their data."""
_ACTED = frozenset({"skip_step", "rollback", "halt"})
_OF_STEP = frozenset({"nonfinite", "nonfinite_state"})
"""Findings for which a capsule is written even if no action was taken."""
_MOST_STEPS = 4096
"""Steps whose data position is remembered; an onset is never older."""


class YieldedBatches:
    """Batches that a loop yielded since the last step."""

    def __init__(self) -> None:
        self._batches: deque[LoadedBatch] = deque(maxlen=_MOST_WAITING)
        self._num_samples: int | None = 0

    def add(self, batch: LoadedBatch) -> None:
        """Record a batch that the loop received, for its position in the data."""
        self._batches.append(batch)
        if self._num_samples is not None and batch.num_samples is not None:
            self._num_samples += batch.num_samples
        else:
            self._num_samples = None

    def pop_batches(self) -> tuple[list[LoadedBatch], int | None]:
        """Return the loop's batches since the last call, and their number of samples if known."""
        taken = list(self._batches), self._num_samples
        self._batches.clear()
        self._num_samples = 0
        return taken


class DataPosition:
    """The data loops of one monitor; a loop may run inside another one, such as a validation.

    ``waited`` is called after each wait for data, with nanoseconds. ``restored`` is the checkpoint
    from which this process resumed; ``schedules`` are stepped at the end of each epoch.
    """

    def __init__(
        self,
        run: RunContext,
        waited: Callable[[int], None],
        *,
        lag: int,
        restored: Restored | None,
        schedules: SchedulerStepper | None = None,
    ) -> None:
        self._schedules = schedules
        self._run = run
        self._probe = run.features[ProbeFeature].probe
        self._waited = waited
        self._num_ranks = run.ranks.world_size
        self._resumes = restored is not None
        self._resumed: DataState | None = None if restored is None else restored.meta.get("data")
        self._resume = self._resumed
        self._loops = 0 if self._resume is None else self._resume["loop"]
        self._stream: Batches | None = None
        self._handed_out = YieldedBatches()
        """Batches that ``_stream`` yielded since the last step."""
        self._outer: tuple[Batches, YieldedBatches] | None = None
        """The loop that encloses the current one."""
        self._replays = False
        self._firsts: dict[int, tuple[BatchIndex, int]] = {}
        """First batch of each step, and its number of batches."""
        self._last_bad = -2
        """Latest step that has a capsule, or that follows such a step without a gap."""
        writer = DataWriter(
            run.run_dir.path,
            rank=run.ranks.rank,
            incarnation=run.emitter.incarnation or new_incarnation(),
            faults=run.faults,
        )
        self._ledger = DataLedger(run.emitter, writer, run.faults, rank=run.ranks.rank, lag=lag)
        if (replicas := run.features.get(ReplicasFeature)) is not None:
            replicas.data_order = self._sampler_seed_and_epoch

    def _sampler_seed_and_epoch(self) -> tuple[int, int]:
        """Return the sampler's seed and epoch in the loop's data; ``NO_ORDER`` if unknown."""
        return NO_ORDER if self._stream is None else self._stream.sampler_seed_and_epoch

    @property
    def position(self) -> BatchIndex | None:
        """Return the position of the batch that the loop received last."""
        return None if self._stream is None else self._stream.position

    @property
    def is_within_batch(self) -> bool:
        """Whether the loop is processing a batch from ``batches``."""
        stream = self._stream
        return stream is not None and stream.position is not None and not stream.ended

    @property
    def next_epoch(self) -> int | None:
        """Return the epoch of the loop's next batch; None before the first loop over data."""
        return None if self._stream is None else self._stream.next_position.epoch

    @property
    def epochs(self) -> tuple[int | None, int]:
        """Return the loop's batches per epoch (None if unknown), and the number of epochs."""
        return (None, 1) if self._stream is None else self._stream.epochs

    def state(self) -> DataState | None:
        """Return the position to resume from; None before the first loop over data."""
        return self._resume if self._stream is None else self._stream.state_dict()

    # ----------------------------------------------------------------------------------- a loop

    def batches(
        self,
        loader: Iterable[Any],
        *,
        epochs: int,
        after_rollback: str,
        sample_ids: SampleIds | bool | None,
        keep_batches: bool,
        step: int,
        probe: LossOf | None = None,
    ) -> Iterator[Any]:
        """Start a loop over data; a loop inside another one is neither recorded nor rewound.

        Raises:
            UsageError: ``after_rollback``, ``sample_ids`` or ``probe`` is invalid; ``loader`` is
                not an iterable, or ``epochs`` not a whole number; or an iterator is to be used for
                several epochs.
        """
        _validate_arguments(after_rollback, sample_ids, probe)
        _check_loader(loader, epochs)
        outer, handed_out = None, YieldedBatches()
        if self._stream is not None and not self._stream.ended:
            outer = self._stream, self._handed_out
        state, self._resume = self._resume, None
        loop, self._loops = self._loops, self._loops + 1
        windows = [convert_window(w, self._num_ranks) for w in self._run.plan.plan.windows]
        stream = Batches(
            loader,
            epochs=epochs,
            clock=self._run.clock,
            waited=self._waited,
            waits=self._run.times.wait_for_data,
            windows=[window for window in windows if window.loop == loop],
            state=state,
            loop=loop,
            num_ranks=self._num_ranks,
            can_rewind=after_rollback == "replay",
            faults=self._run.faults,
            keeps_content=outer is None and (keep_batches or callable(sample_ids)),
            keeps_rng=outer is None and keep_batches,
            seen=None if probe is None else self._probe.keep,
            handed_out=handed_out.add,
        )
        if self._resumes:
            self._resumes = False
            self._note_data_position(stream.why_not_exact(state), stream, step)
        if probe is not None:
            attempt = self._run.attempt
            self._probe.set_loss(probe, step=step, attempt=attempt)
        self._stream, self._handed_out, self._outer = stream, handed_out, outer
        if outer is None:
            self._firsts.clear()  # they refer to a loop that has ended
            self._replays = after_rollback == "replay"
            self._ledger.sample_ids, self._ledger.keep_batches = sample_ids, keep_batches
            surroundings = self._run.surroundings
            if keep_batches and surroundings is not None:
                with self._run.faults.fail_open("capsule.hooks"):
                    surroundings.open()
                    self._ledger.surroundings = surroundings
        return self._iterate_stream(stream, outer)

    def _iterate_stream(
        self, stream: Batches, outer: tuple[Batches, YieldedBatches] | None
    ) -> Iterator[Any]:
        """Yield a loop's batches, and step schedulers at epochs; then continue the outer loop."""
        try:
            schedules = self._schedules if outer is None else None
            yield from stream if schedules is None else schedules.iterate_epochs(stream)
        finally:
            if outer is not None and self._stream is stream:
                # The inner loop has ended, for example a validation.
                self._stream, self._handed_out = outer
                self._outer = None

    # ----------------------------------------------------------------------------------- a step

    def record_step(self, step: int, attempt: int) -> tuple[BatchPosition | None, int | None]:
        """Record the batches of a step; return its position and number of samples, None if unknown.

        A rollback and ``DataLedger`` use the record. Call before the update of the step.
        """
        stream = self._stream
        if stream is None or stream.position is None:
            return None, None if stream is None else 0
        taken, num_samples = self._handed_out.pop_batches()
        if self._outer is not None and self._outer[1].pop_batches()[0]:
            stream.shares_steps = True
        self._ledger.record_batches(step, attempt, taken)
        if self._probe.has_loss:
            self._probe.fed(step, len(taken), attempt=attempt)
        first = taken[0].position if taken else stream.position
        self._firsts[step] = first, max(1, len(taken))
        self._firsts.pop(step - _MOST_STEPS, None)
        return BatchPosition(*stream.position, len(taken)), num_samples

    def report_step_data(self, step: int, judgement: Judgement) -> None:
        """Report the data of a step that has findings or was skipped."""
        decision = judgement.decision
        skipped = decision is not None and decision.action == "skip_step"
        is_bad, facts = bool(judgement.findings) or skipped, None
        if is_bad and self._ledger.keep_batches:
            with self._run.faults.fail_open("capsule"):
                facts = self._capsule_facts(step, judgement)
        self._ledger.process_verdict(step, is_bad, facts)

    def _capsule_facts(self, step: int, judgement: Judgement) -> dict[str, Any] | None:
        """Return the contents of a repro capsule for a bad step; None if this rank writes none.

        Only the first of consecutive bad steps gets a capsule, on the ranks that caused it if they
        are known. Waits for the device; acceptable because the step is bad.
        """
        run, decision = self._run, judgement.decision
        surroundings, judged = run.surroundings, run.judged
        if surroundings is None or judged is None or judged[0].step != step:
            return None
        record, reduced = judged
        acted = decision is not None and decision.rule != "command" and decision.action in _ACTED
        is_apart = record.replicas_differ > 0
        reasons = [f.reason for f in judgement.findings if is_apart or f.kind in _OF_STEP]
        if not acted and not reasons:
            return None
        in_row, self._last_bad = self._last_bad in (step, step - 1), step
        concerned = record.nonfinite_ranks or tuple(r for r in (record.replica_rank,) if r >= 0)
        if record.withheld and not concerned:
            concerned = (record.loss_max_rank,)
        rank = run.ranks.rank
        if in_row or (concerned and rank not in concerned):
            return None
        recovery, replicas = run.recovery, run.replicas
        refs = () if recovery is None else recovery.refs()
        before = sorted((r for r in refs if r.step <= step), key=lambda r: r.step)
        return {
            "run_id": run.run_dir.run_id,
            "mode": run.mode,
            "world_size": run.ranks.world_size,
            "reason": decision.reason if acted and decision is not None else reasons[0],
            "rule": decision.rule if acted and decision is not None else "",
            "applied": not record.skipped,
            "replica": None if replicas is None else replicas.bad_elements(),
            "loss": reduced.losses()[rank],
            "grad_norm": record.grad_norm,
            "loss_limit": record.loss_limit,
            "grad_norm_limit": record.grad_norm_limit,
            "checkpoints": [{"id": r.id, "step": r.step, "where": r.where} for r in before[-4:]],
            "checkpoint_dir": "" if recovery is None else str(recovery.settings.directory),
            **surroundings.describe_state(),
        }

    # ------------------------------------------------------------------------------- a rollback

    def window_of(self, decision: Decision | None) -> BatchWindow | None:
        """Return the batches of the loop that a rollback skips; None if it skips none."""
        if decision is None or decision.action != "rollback" or not decision.acted:
            return None
        stream = self._stream
        if stream is None or stream.position is None or not decision.skip_batches:
            return None
        onset_step = self._run.judge.facts.skipped_windows[-1].onset_step
        first, num_a_step = self._firsts.get(onset_step, (stream.position, 1))
        # If optimizers take turns (a GAN), several steps use one batch.
        steps_a_batch = sum(position == first for position, _ in self._firsts.values()) or 1
        num_batches = -(-decision.skip_batches // steps_a_batch) * num_a_step
        return BatchWindow(*first, num_batches, stream.loop, self._num_ranks)

    def can_replay(self) -> bool:
        """Return whether this rank could replay exactly what followed the resumed checkpoint."""
        stream = self._stream
        if stream is None or stream.position is None or self._resumed is None:
            return False
        return not stream.why_not_exact(self._resumed)

    def replay(self) -> None:
        """Rewind to the position this process resumed from, if the loader supports it."""
        if self._stream is not None:
            self._stream.rewind(self._resumed)
            self._handed_out.pop_batches()

    def rewind_after_rollback(
        self, decision: Decision, state: DataState | None, window: BatchWindow | None, *, step: int
    ) -> bool:
        """Rewind the data to the checkpoint's position, or continue; skip the window in both cases.

        Returns:
            Whether the data was rewound.
        """
        stream = self._stream
        if stream is None or stream.position is None:
            return False
        if window is not None:
            for part in stream.skip(window):
                event = DataWindowSkipped(
                    epoch=part.epoch,
                    first_batch=part.first_batch,
                    last_batch=part.first_batch + part.num_batches,
                    reason=decision.reason,
                )
                attempt = self._run.attempt
                self._run.emitter.run_event(event, step=step, attempt=attempt)
        reason = stream.rewind(state) if self._replays else "the loop is not to replay"
        if reason and window is not None:
            past = window.first_batch + window.num_batches
            stream.move_to(BatchIndex(window.epoch, past))
        self._handed_out.pop_batches()
        self._note_data_position(reason, stream, step)
        return not reason

    def _note_data_position(self, reason: str, stream: Batches, step: int) -> None:
        """Log at which batch the data continues, and whether exactly."""
        at = stream.next_position
        where = f"batch {at.batch} of epoch {at.epoch}"
        text = f"data: continues exactly at {where}"
        if reason:
            text = f"data: continues at {where} (not exact: {reason})"
        self._run.emitter.note("data", text, step=step, attempt=self._run.attempt)

    def close(self) -> None:
        """Wait up to 2 seconds for queued files, and close them."""
        self._ledger.close()
        if self._run.surroundings is not None:
            self._run.surroundings.close()


def _validate_arguments(after_rollback: str, sample_ids: object, probe: object) -> None:
    """Refuse invalid options of a loop over data: ``probe``, ``after_rollback``, ``sample_ids``."""
    if probe is not None and not callable(probe):
        raise UsageError(
            f"probe is {name_type(probe)}; it must be a function",
            hint="probe=loss_of, where loss_of(batch) returns the loss that the loop trains on",
        )
    if after_rollback not in ("move_on", "replay"):
        raise UsageError(
            f"after_rollback is {after_rollback!r}; it must be 'move_on' or 'replay'",
            hint="'replay' trains every batch again, 'move_on' leaves the data where it is",
        )
    if not (sample_ids is None or isinstance(sample_ids, bool) or callable(sample_ids)):
        raise UsageError(
            f"sample_ids is {name_type(sample_ids)}; it must be True or a function",
            hint="sample_ids=lambda batch: batch['id'] gives the ids of a batch's samples; True "
            "takes the indices in the dataset",
        )


def _check_loader(loader: object, epochs: int) -> None:
    """Refuse a loader, or a number of epochs, that a loop over data cannot iterate."""
    if not isinstance(epochs, SupportsIndex):
        raise UsageError(
            f"epochs is {epochs!r}; it must be a whole number",
            hint="monitor.batches(loader, epochs=3)",
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise UsageError(
            f"batches() was given {loader!r:.100}, which is not an iterable of batches",
            hint="monitor.batches(loader, epochs=3); any iterable of batches works",
        )
    if isinstance(loader, Iterator) and epochs > 1:
        raise UsageError(
            f"batches() was given an iterator ({type(loader).__name__}) for {epochs} epochs; it is "
            "exhausted after the first one",
            hint="pass the loader itself, not iter(loader) or a generator",
        )


# ----------------------------------------------------------------- samples of each step


MAX_STEPS = 64
"""Steps whose samples are remembered until their verdict, and a while longer."""
MAX_IDS = 4096
"""Ids in one event; ``num_samples`` counts all of them."""
MAX_ID_BYTES = 32 << 10
"""Bytes of all ids in one event, if they are strings."""
MAX_WORD = 256
"""Characters per id."""

SampleIds = Callable[[Any], Iterable[Any]]
"""Returns the ids of a batch's samples: numbers or strings."""


@dataclass(slots=True)
class _StepBatches:
    """Batches of one step, and the state needed to reproduce it."""

    step: int
    attempt: int
    batches: list[LoadedBatch]
    ids: list[Sequence[Any] | None]
    """Sample ids per batch; None if unknown."""
    loaded_batches: list[LoadedBatch]
    autocast: AutocastSetting | None = None
    loss_scale: torch.Tensor | None = None


class DataLedger:
    """Samples of the latest steps, by ``record_batches``; ``process_verdict`` reports bad ones."""

    def __init__(
        self, emitter: Emitter, writer: DataWriter, faults: FaultCounter, *, rank: int, lag: int
    ) -> None:
        self._emitter = emitter
        self._writer = writer
        self._faults = faults
        self._rank = rank
        self._lag = lag
        self._steps: OrderedDict[int, _StepBatches] = OrderedDict()
        self.sample_ids: SampleIds | bool | None = None
        """If set, the ids of every step are written to a file; True writes the dataset indices."""
        self.keep_batches = False
        """Whether a repro capsule is written for a bad step."""
        self.surroundings: CapsuleContext | None = None
        self._good: Any = None
        """First batch of the latest step that was not bad."""

    def record_batches(self, step: int, attempt: int, batches: Sequence[LoadedBatch]) -> None:
        """Record the batches that the loop used in a step; call before its update."""
        if not batches:
            return
        with self._faults.fail_open("data.ledger"):
            ids = [self._ids(batch) for batch in batches]
            kept_batches = [b for b in batches if self.keep_batches and b.content is not None]
            light = [batch._replace(content=None, rng=None) for batch in batches]
            self._steps.pop(step, None)  # an entry of an attempt that was rolled back
            entry = self._steps[step] = _StepBatches(step, attempt, light, ids, kept_batches)
            if self.surroundings is not None:
                entry.autocast = self.surroundings.autocast
                entry.loss_scale = self.surroundings.loss_scale()
            while len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
            for old in islice(reversed(self._steps.values()), self._lag + 1, None):
                if not old.loaded_batches:
                    break
                old.loaded_batches = []
            if self.sample_ids:
                self._enqueue_sample_ids(self._steps[step])

    def _ids(self, batch: LoadedBatch) -> Sequence[Any] | None:
        """Return the batch's ids. A user function runs now: the loop may modify the batch."""
        if callable(self.sample_ids) and batch.content is not None:
            with self._faults.fail_open("sample_ids"):
                return _list_sample_ids(self.sample_ids(batch.content))
            return None
        return batch.indices

    def _enqueue_sample_ids(self, entry: _StepBatches) -> None:
        """Queue the sample ids of the loop's step, if known, to be written."""
        if all(ids is None for ids in entry.ids):
            return
        first = entry.batches[0].position
        self._writer.enqueue(
            StepSamples(
                step=entry.step,
                attempt=entry.attempt,
                epoch=first.epoch,
                first_batch=first.batch,
                num_batches=len(entry.batches),
                sample_ids=tuple(plain_id(i) for ids in entry.ids for i in ids or ()),
            )
        )

    def process_verdict(self, step: int, bad: bool, facts: dict[str, Any] | None = None) -> None:
        """Report the samples of the loop's bad step; release the batches in any case.

        A step is bad if it has findings or was skipped. Without ``facts``, no capsule is written.
        """
        if not self._steps:
            return
        with self._faults.fail_open("data.ledger"):
            entry = self._steps.get(step)
            if entry is None:
                return
            kept_batches, entry.loaded_batches = entry.loaded_batches, []
            if bad:
                self._report_batches(entry, kept_batches, facts)
            elif kept_batches:
                self._good = kept_batches[0].content

    def _report_batches(
        self, entry: _StepBatches, kept_batches: list[LoadedBatch], facts: dict[str, Any] | None
    ) -> None:
        """Report the data of the loop's bad step, and queue its repro capsule if it gets one."""
        first, file = entry.batches[0].position, ""
        reported = [ids for ids in entry.ids if ids is not None]
        sample_ids = _as_many_as_fit(plain_id(i) for ids in reported for i in ids)
        if facts is not None:
            name = f"{FOLDER}/step-{entry.step:08d}-{entry.attempt}-rank-{self._rank}.npz"
            scale, autocast = entry.loss_scale, entry.autocast
            facts |= {
                "epoch": first.epoch,
                "first_batch": first.batch,
                "sample_ids": list(sample_ids),
                "batch_sizes": [len(ids) for ids in reported],
                "loss_scale": None if scale is None else scale.item(),
                "autocast": None if autocast is None else [autocast.device, autocast.dtype],
            }
            content = Content(
                facts=facts,
                batches=[batch.content for batch in kept_batches],
                rng=[batch.rng for batch in kept_batches],
                good=self._good,
            )
            file = name if self._writer.enqueue(BadStep(name, content)) else ""
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
        """Wait up to 2 seconds for queued files of the loop's data, and close them."""
        with self._faults.fail_open("data.ledger"):
            self._writer.close()


def plain_id(value: Any) -> int | str:
    """Return an id in the loop's data as number or string; samplers may yield tensors or others."""
    if isinstance(value, str):
        return value[:MAX_WORD]
    try:
        number = index(value)
    except TypeError:
        return str(value)[:MAX_WORD]
    return number if -(2**63) <= number < 2**63 else str(number)[:MAX_WORD]


def _list_sample_ids(ids: Any) -> list[Any]:
    """Return the ids as a list; refuse device tensors, since reading them would block the loop."""
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise ValueError(
                f"sample_ids gave a tensor on {ids.device}; return numbers on the host"
            )
        return [int(i) for i in ids.flatten().tolist()]
    return list(ids)


def _as_many_as_fit(ids: Iterable[int | str]) -> tuple[int | str, ...]:
    """Return the longest prefix of a loop step's sample ids that fits into one event."""
    fitting: list[int | str] = []
    room = MAX_ID_BYTES
    for sample_id in islice(ids, MAX_IDS):
        room -= 2 + len(sample_id.encode()) if isinstance(sample_id, str) else 5
        if room < 0:
            break
        fitting.append(sample_id)
    return tuple(fitting)
