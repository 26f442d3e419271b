"""A capability that takes part in every step, and the list of them that a step loops over.

A step measures the gradients, sums one vector over the ranks, judges it and applies the update.
Everything else that happens in a step is a ``StepFeature``. ``trainer_hooks.features.FEATURES``
lists them; no module of this package names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from trainer_hooks.exchange.reduce_vector import ReducedNumbers, Slots, VerdictFigures
from trainvitals.auto_clip import MaxNorm
from trainvitals.policy import Judgement, Proposal
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.state import CheckpointRef
from trainvitals.records import AttemptStarted, Command, Finding, StepRecord
from trainvitals.rows import Value

if TYPE_CHECKING:
    from trainer_hooks.measures.host import HostMeasurements
    from trainer_hooks.measures.sampled import SampledSignals
    from trainer_hooks.step.context import RunContext

Feature = TypeVar("Feature", bound="StepFeature")


class OutgoingStep(NamedTuple):
    """A step before its exchange, as this rank knows it."""

    step: int
    attempt: int
    turn: int
    """Number of the optimizer that is stepped alone; 0: all optimizers."""
    max_norm: MaxNorm | None
    """Norm to which the loop clips; None if it does not clip, or unknown."""
    rates: Sequence[float | None]
    """Learning rates that the loop requests, by parameter group."""
    is_scheduled: bool
    """Whether a scheduler given to ``watch`` has set the first rate."""


class ReturnedStep(msgspec.Struct):
    """A step whose summed numbers have reached the host."""

    reduced: ReducedNumbers
    measured: HostMeasurements
    record: StepRecord
    """The step as the detectors see it; ``StepFeature.complete`` may replace it."""
    now_step: int
    """The step in whose call this happens: ``lag`` steps later."""
    derived: VerdictFigures
    """The device's own figures."""
    samples: SampledSignals | None
    """Sampled signals; None in most steps."""
    optimizer: str
    """Name of the optimizer that was stepped alone; empty: all optimizers."""
    columns: Mapping[str, Value] = {}
    """Columns of this rank's row in addition to the record: those that features set in
    ``on_reduced``, and all once the row is written. A feature replaces the mapping."""
    command: Proposal | None = None
    """Manual command that is judged with the step."""
    unavailable_commands: Mapping[str, str] = {}
    """Commands that the loop cannot carry out, with the reasons."""
    differing_ranks: tuple[int, ...] = ()
    """Ranks that differ where they must be equal."""
    may_share_copies: bool = True
    """Whether ranks may still share a copy of their state."""
    checkpoints: Sequence[CheckpointRef] = ()
    """Possible targets of a rollback."""
    next_attempt: int = 0
    """Id of the attempt that a rollback would start."""
    probe: Callable[[Ask], ProbeResult] | None = None
    """Reads the probe; None if it is off."""
    evaluation: float | None = None
    """Ratio of a validation loss to the previous one; None without an evaluation."""
    written: Finding | None = None
    """Finding about weights that something else than the optimizer changed."""
    collapse: Finding | None = None
    """Finding about the scalars of a post-training run that halts it; its text is rank 0's."""

    @property
    def step(self) -> int:
        """Return the index of the step whose numbers have returned."""
        return self.measured.step

    @property
    def attempt(self) -> int:
        """Return the attempt of the step whose numbers have returned."""
        return self.measured.attempt


class StepFeature:
    """One capability that takes part in every step, such as early stopping or snapshots.

    A base class and not a protocol: a feature overrides only the hooks it uses, and a step calls
    only overridden ones, so an unused hook costs nothing. A contribution has two hooks, because a
    rank that could not measure a step still has to report that it received SIGTERM.

    Hooks run on all ranks in the same order. Except for ``rank0_values`` and the contributions,
    they see the same numbers on all ranks, so all ranks must do the same; they read no clock and
    no file to decide. A hook keeps its own internal errors from the loop, with
    ``RunContext.faults``, but never encloses a collective or a decision.
    """

    slots: ClassVar[Slots] = Slots()
    """Numbers that this feature adds to the vector that the ranks sum."""
    state_key: ClassVar[str] = ""
    """Key of ``state_dict`` in snapshots and checkpoints; empty: no state. Part of the format."""
    is_resumable: ClassVar[bool] = False
    """Whether the state is also in ``Monitor.state_dict``, for loops with their own checkpoints."""

    def __init__(self, run: RunContext) -> None:
        self._run = run

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature of a run; None if the run does not use it. Collective."""
        return cls(run)

    @property
    def idle_hooks(self) -> tuple[str, ...]:
        """Return names of overridden hooks with no work in this run, so that no step calls them."""
        return ()

    def before_measure(self, step: OutgoingStep) -> None:
        """Work on this rank before its gradients are measured; may change them."""

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return values for ``slots.rank0``; called on rank 0 only, before the exchange."""
        return {}

    def contribute(self, step: OutgoingStep) -> Mapping[str, Tensor | float]:
        """Return this rank's values for ``slots.rank``, without waiting for the device.

        An error, here or elsewhere in the preparation, drops the contributions of the step.
        """
        return {}

    def contribute_always(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return values that are also sent if the rank could not measure the step."""
        return {}

    def before_update(self) -> None:
        """Make a step's update wait, on the device, for what still reads the state."""

    def complete(self, step: ReturnedStep) -> None:
        """Add to ``step.record`` what the ranks know together; may be collective, and may raise."""

    def on_reduced(self, step: ReturnedStep) -> None:
        """Apply the reduced numbers of a step, before it is judged."""

    def annotate(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Return the judgement with names and reasons added; never with another action."""
        return judgement

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Process the final judgement of a step, before its row is written."""

    def on_row_written(self, step: ReturnedStep) -> None:
        """Report on a step after its row and its findings; also for steps of an old attempt."""

    def on_step_done(self, step: ReturnedStep) -> None:
        """Do the work at the end of a judged step, after its row and findings are written."""

    def own_command(self) -> Command | None:
        """Return a command the run orders in a step itself; on rank 0, if no operator's waits."""
        return None

    def on_command(self, command: Proposal, *, now_step: int) -> None:
        """Start the action of an accepted command that needs no decision about an update."""

    @property
    def has_pending_work(self) -> bool:
        """Return whether ``run_between_steps`` has work; equal on all ranks or local."""
        return False

    def run_between_steps(self, step: int, device: torch.device) -> Iterable[Judgement]:
        """Work after ``step``, outside of any step. May be collective.

        Yields judgements of commands, which are carried out at once.

        Args:
            step: the latest completed step.
            device: device of the group's tensors.
        """
        return ()

    def on_change_expected(self, num_steps: int) -> None:
        """Abstain for some steps: the loop announced a change with ``monitor.expect``."""

    def on_second_start(self) -> str:
        """Continue in a run that was started before, without its state.

        Returns the end of the warning about it: what this feature no longer checks, or "".
        """
        return ""

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Continue as an attempt from ``attempt.fork_step``: at the start and after a rollback."""

    def on_restored(self, next_step: int) -> None:
        """Drop what depends on the state after ``next_step``: an earlier one was restored."""

    def state_dict(self) -> Any:
        """Return the state that a step's feature saves as plain values, equal on all ranks."""
        return None

    def load_state_dict(self, state: Any, *, step: int) -> None:
        """Continue a feature from a state before ``step``; None: the snapshot has no such state."""

    @classmethod
    def check_state(cls, state: Any) -> None:
        """Raise any error if ``load_state_dict`` could not use the feature's resumable state."""

    def stop_collectives(self) -> None:
        """Enter no collective after this step: the loop ends, and other ranks may be gone."""

    def close(self) -> None:
        """Finish after the loop's last step. Enters no collective: other ranks may be gone."""


class StepFeatures:
    """The features of a run, in the order in which a step calls them."""

    def __init__(self, kinds: Sequence[type[StepFeature]]) -> None:
        """``kinds``: all kinds that a run can have; the state of a missing one is None."""
        self._kinds = tuple(kinds)
        self._no_states: dict[str, Any] = dict.fromkeys(k.state_key for k in kinds if k.state_key)
        self._resumable_keys = tuple(kind.state_key for kind in kinds if kind.is_resumable)
        self._features: tuple[StepFeature, ...] = ()
        # By name and not by class: a notebook may have loaded the modules again.
        self._by_name: dict[str, StepFeature] = {}

    def build(self, run: RunContext) -> None:
        """Build the features that the run's steps use. Collective."""
        for kind in self._kinds:
            feature = kind.make(run)
            if feature is not None:
                self._by_name[kind.__qualname__] = feature
        self._features = tuple(self._by_name.values())
        self._before_measure = self._overriding("before_measure")
        self._rank0_values = self._overriding("rank0_values")
        self._contribute = self._overriding("contribute")
        self._contribute_always = self._overriding("contribute_always")
        self._before_update = self._overriding("before_update")
        self._complete = self._overriding("complete")
        self._on_reduced = self._overriding("on_reduced")
        self._annotate = self._overriding("annotate")
        self._on_judged = self._overriding("on_judged")
        self._on_row_written = self._overriding("on_row_written")
        self._on_step_done = self._overriding("on_step_done")
        self._own_command = self._overriding("own_command")
        self._between_steps = [
            feature
            for feature in self._features
            if type(feature).run_between_steps is not StepFeature.run_between_steps
        ]

    def _overriding(self, hook: str) -> tuple[Any, ...]:
        """Return the hook of each feature that overrides it: looked up once, not in every step."""
        default = getattr(StepFeature, hook)
        return tuple(
            getattr(feature, hook)
            for feature in self._features
            if getattr(type(feature), hook) is not default and hook not in feature.idle_hooks
        )

    def __iter__(self) -> Iterator[StepFeature]:
        return iter(self._features)

    def get(self, kind: type[Feature]) -> Feature | None:
        """Return the feature of this class for the run's steps; None if the run does not use it."""
        return cast(Feature | None, self._by_name.get(kind.__qualname__))

    def __getitem__(self, kind: type[Feature]) -> Feature:
        """Return the feature of a class that every run has."""
        return cast(Feature, self._by_name[kind.__qualname__])

    def before_measure(self, step: OutgoingStep) -> None:
        """Let all features work before this rank measures its gradients."""
        for hook in self._before_measure:
            hook(step)

    def rank0_values(self, step: OutgoingStep) -> dict[str, float]:
        """Return the values of all features for rank 0's slots."""
        values: dict[str, float] = {}
        for hook in self._rank0_values:
            values |= hook(step)
        return values

    def contribute(self, step: OutgoingStep) -> dict[str, Tensor | float]:
        """Return this rank's values of all features, with ``contribute_always``."""
        values: dict[str, Tensor | float] = {**self.contribute_always(step)}
        for hook in self._contribute:
            values |= hook(step)
        return values

    def contribute_always(self, step: OutgoingStep) -> dict[str, float]:
        """Return the features' values that are also sent if the preparation failed."""
        values: dict[str, float] = {}
        for hook in self._contribute_always:
            values |= hook(step)
        return values

    def before_update(self) -> None:
        """Make the step's update wait on the device, for all features."""
        for hook in self._before_update:
            hook()

    def complete(self, step: ReturnedStep) -> None:
        """Complete the record of a step. Collective if ranks differ."""
        for hook in self._complete:
            hook(step)

    def on_reduced(self, step: ReturnedStep) -> None:
        """Let all features apply what all ranks reported with a step."""
        for hook in self._on_reduced:
            hook(step)

    def annotate(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Return the judgement with the names and reasons of all features."""
        for hook in self._annotate:
            judgement = hook(step, judgement)
        return judgement

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Pass on the final judgement of a step to all features."""
        for hook in self._on_judged:
            hook(step, judgement)

    def on_row_written(self, step: ReturnedStep) -> None:
        """Call ``on_row_written`` of all features."""
        for hook in self._on_row_written:
            hook(step)

    def on_step_done(self, step: ReturnedStep) -> None:
        """Let all features work at the end of a judged step."""
        for hook in self._on_step_done:
            hook(step)

    def own_command(self) -> Command | None:
        """Return the first command that a feature orders itself for a step."""
        for hook in self._own_command:
            command: Command | None = hook()
            if command is not None:
                return command
        return None

    @property
    def has_pending_work(self) -> bool:
        """Return whether a feature has work between two steps."""
        # Not any(...): a generator costs each step more than the two properties.
        for feature in self._between_steps:  # noqa: SIM110
            if feature.has_pending_work:
                return True
        return False

    def run_between_steps(self, step: int, device: torch.device) -> Iterator[Judgement]:
        """Let each feature work between two steps; yields judgements to carry out at once."""
        for feature in self._between_steps:
            yield from feature.run_between_steps(step, device)

    def state_dict(self) -> dict[str, Any]:
        """Return all features' states by key, for a snapshot."""
        states = {f.state_key: f.state_dict() for f in self._features if f.state_key}
        return self._no_states | states

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue all features from the states of a snapshot."""
        for feature in self._features:
            if feature.state_key:
                feature.load_state_dict(state.get(feature.state_key), step=step)

    def resumable_state(self) -> dict[str, Any]:
        """Return the features' states for a checkpoint of the loop itself."""
        states = dict.fromkeys(self._resumable_keys)
        return states | {f.state_key: f.state_dict() for f in self._features if f.is_resumable}

    def resume(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue the features from ``resumable_state``."""
        for feature in self._features:
            if feature.is_resumable:
                feature.load_state_dict(state.get(feature.state_key), step=step)
