"""What the ladder knows and what is in force by it: memory, limits, withholding, the rate's factor.

The memory has two parts. What is in ``LadderMemory`` only moves forward (budgets spent, commands
applied, ledger sequence): it lives in the plan journal, and no restore gives a budget back. The
rest of ``LadderState`` describes the present branch and starts anew after a rollback.

A finite outlier that is far beyond all that the run has been through is withheld, within two
bounds: two updates in a row, then one is applied; and eight in 1,000 steps. A withheld update
leaves the weights where the next batch is an outlier too, so it creates its own evidence: without
bounds a healthy run can freeze. All other outliers are reported only.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from trainvitals.config import AboveOne, AboveZero, AtLeastOne, Count, NotNegative, Settings
from trainvitals.detect.outliers import Limits
from trainvitals.records import Command, CommandAction, Finding, StepRecord

Mode = Literal["observe", "guard", "heal"]
CheckpointState = Literal["candidate", "verified", "healthy", "retired", "bad"]

FOREVER = 1 << 53
"""A step that never comes."""

NEWEST = -1.0
"""Argument of a rollback to the newest healthy checkpoint."""


class LadderConfig(Settings, frozen=True, kw_only=True):
    """When updates are withheld, when the run is rolled back, and the budget of each."""

    section = "ladder"

    max_row: AtLeastOne = 2
    """Most updates withheld in a row for finite outliers; the next outlier is applied."""
    max_withheld: AtLeastOne = 8
    """Most updates withheld for finite outliers in any ``withheld_window`` steps; further outliers
    are applied."""
    withheld_window: AtLeastOne = 1000
    """Steps over which withheld updates and questions to the probe are counted."""
    ask_after: AtLeastOne = 3
    """Non-finite steps in a row after which the probe runs. After a finite finding it runs at
    once."""
    ask_pause: AtLeastOne = 16
    """Steps between a question to the probe about finite values and the next one; doubled with each
    further question in ``withheld_window`` steps, so a healthy run is not slowed."""
    state_ratio: AboveOne = 2.0
    """The state is damaged if kept batches read above this multiple of their earlier loss."""
    state_ratio_unclipped: AboveOne = 5.0
    """The same where the loop does not clip: healthy states reach 4.3 there, after a hard batch
    that was applied. In between, nothing is rolled back or withheld."""
    state_ratio_jump: AboveOne = 1.25
    """The same right after a learning-rate jump: healthy states reach 1.02 there, and near chance
    level a damaged one cannot get much worse."""
    state_progress: AboveZero = 0.5
    """The state is also damaged if kept batches read that share of the run's progress worse than
    before: near chance level no multiple is reached. 1.5 times as much without a clip."""
    state_floor: NotNegative = 0.02
    """Share of the run's first losses added to both sides of that ratio, so that losses near 0 do
    not inflate it."""
    nonfinite_in_a_row: AtLeastOne = 32
    """Non-finite steps in a row, with finite parameters, after which the run is rolled back, unless
    the probe found the state healthy."""
    margin: Count = 20
    """A rollback goes at least this many steps before the onset (PaLM: about 100): what ends in a
    spike began earlier. The initial state is exempt, as nothing older exists."""
    leave_out_margin: Count = 3
    """Batches skipped before the onset and after the last flagged one; doubled each time the same
    cause recurs."""
    max_leave_out_margin: AtLeastOne = 1000
    """Upper limit of that doubling."""
    finite_cooldown: Count = 1000
    """Minimum number of steps between two rollbacks that are based on finite values."""
    lr_jump: AboveOne = 3.0
    """Factor by which the learning rate must rise in one step to be a jump."""
    lr_jump_steps: Count = 40
    """Steps after a jump within which damage to the state is attributed to it."""
    level_rise: AboveZero = 0.25
    """Share of the improvement since the first losses that must be lost (over 8 steps, right after
    a learning-rate jump) before the probe runs."""
    max_tries: AtLeastOne = 3
    """Rollbacks per cause; if it recurs after that, the run halts."""
    max_causes: AtLeastOne = 10
    """Causes handled by rollback within ``budget_window`` steps; one more halts the run."""
    budget_window: AtLeastOne = 10_000
    """Steps after which a cause no longer counts against the budget."""
    lr_cut: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """Factor applied to the learning rate at each rollback for the same cause, from the second one
    on."""
    lr_rewarm_steps: AtLeastOne = 200
    """Steps over which a lowered learning rate returns to normal after the bad steps."""
    max_skips_in_a_row: AtLeastOne = 100
    """Non-finite steps in a row after which a run that cannot be rolled back halts."""
    ask: tuple[Literal["rollback", "lr_cut"], ...] = ()
    """What waits for a person's yes: every rollback, or those that lower the learning rate.
    Answered by ``vitals command RUN approve`` or ``veto``, or on the dashboard."""
    ask_steps: AtLeastOne = 500
    """Steps after which, without an answer, ``ask_default`` is done; after a veto, those before the
    same may be asked again."""
    ask_default: Literal["approve", "veto"] = "approve"
    """What is done where nobody answers."""


class CheckpointRef(msgspec.Struct, frozen=True, kw_only=True):
    """A state training can go back to. The list given to the ladder is equal on all ranks."""

    id: str
    step: int
    """The step that is trained next from it: the number of steps attempted before it."""
    attempt: int = 0
    state: CheckpointState = "healthy"
    where: Literal["memory", "disk"] = "memory"


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A verified command as all ranks know it after the exchange.

    Where only numbers travel, ``argument`` names the checkpoint of a rollback by its step; NEWEST
    asks for the newest healthy one. Any other number that is no checkpoint's step is refused, so an
    id that rank 0 cannot resolve should travel as -2.
    """

    number: int
    action: CommandAction
    argument: float = NEWEST
    checkpoint_id: str = ""

    @classmethod
    def of(cls, command: Command) -> Proposal:
        """Return the command's part that decides. A rollback without an id means the newest."""
        argument = NEWEST if command.action == "rollback" else command.argument
        return cls(
            number=command.number,
            action=command.action,
            argument=argument,
            checkpoint_id=command.checkpoint_id,
        )


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause under treatment."""

    kind: str
    onset_step: int
    until_step: int
    """Trouble of the same kind before this step touches it, and is the same cause."""
    tries: int = 1
    """Rollbacks for it."""
    target_step: int = -1
    """Where the last rollback went to."""


class SkippedWindow(msgspec.Struct, frozen=True, array_like=True):
    """Data that training moved past."""

    onset_step: int
    """First step whose batches are left out."""
    num_batches: int


class LrJump(msgspec.Struct, frozen=True, array_like=True):
    """The newest jump of the learning rate that nobody announced."""

    step: int
    before: float
    after: float
    level: float
    """Median of the clean losses before it, their robust deviation, and the run's first losses."""
    noise: float
    first: float


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A rollback that waits for a person's yes, or was vetoed."""

    number: int
    """Of its entry in the ledger."""
    until: int
    """By the clock: when the default is done, or a veto is over."""
    rule: str
    kind: str
    onset_step: int
    reason: str
    finding: Finding
    plays_all: bool
    is_finite: bool = False
    """Whether it rests on finite evidence, which has a cooldown."""
    jump: LrJump | None = None
    """The jump of the learning rate that is to blame."""
    vetoed: bool = False


class AcceptedLevel(msgspec.Struct, frozen=True, array_like=True):
    """Values that an operator accepted: nothing up to them is withheld."""

    loss: float = 0.0
    """0 if the metric has no such value; so is ``grad_norm``."""
    grad_norm: float = 0.0
    turn: int = 0
    """The optimizer whose steps they were; 0 if all are stepped together."""


class LadderMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the ladder's memory that no restore sets back. Lives in the plan journal."""

    attempt: int = 0
    """Id of the present branch; 0 until the first record tells it."""
    clock: int = 0
    """Steps judged in all branches: what cooldowns and budgets are counted in."""
    ledger_seq: int = 0
    """Entries written to the ledger."""
    num_skips: int = 0
    num_rollbacks: int = 0
    causes: tuple[int, ...] = ()
    """When each cause was first treated by rollback, by the clock; those within the window."""
    cause: Cause | None = None
    accepted: tuple[AcceptedLevel, ...] = ()
    """Levels that an operator accepted, at most one per optimizer."""
    blamed: tuple[int, ...] = ()
    """Onsets that a rollback on finite evidence was spent on: none is repeated."""
    corrupted: tuple[tuple[int, int], ...] = ()
    """When a rollback was spent on replicas that differed, by the clock, and the rank that was
    wrong, -1 where nobody knew; those within the window."""
    uncured_until: int = 0
    """No rollback for a non-finite state before this time of the clock: one did not cure it."""
    cooldown_until: int = 0
    """No rollback on finite evidence before this time of the clock."""
    last_command: int = 0
    """Number of the newest command that was answered."""
    skipped_windows: tuple[SkippedWindow, ...] = ()
    """The newest 100 of them."""
    lr_factor: float = 1.0
    lr_hold_until: int = 0
    """Step up to which the learning rate is multiplied by ``lr_factor``."""
    lr_full_from: int = 0
    """Step from which it is whole again; between the two it climbs linearly."""
    lr_cap: float = 0.0
    """The rate before a jump, held while the schedule asks for ``lr_jump`` times it; 0: none."""
    lr_cap_from: int = 0
    """Step of that jump: before it, a lower rate does not end the hold."""
    lr_scale: float = 1.0
    """An operator's factor on the schedule's learning rate, until the next one."""
    lr_held: float = 0.0
    """The learning rate that an operator holds; 0: the schedule's."""
    skip_attempt: int = 0
    """The branch on which an operator has updates skipped: none of it holds on another one."""
    skip_first: int = 0
    skip_last: int = -1
    """First and last of those steps."""
    waiting: Waiting | None = None
    """A rollback that waits for a yes."""
    halted: str = ""
    """Why the ladder gave up, or empty."""

    def is_skipped(self, step: int) -> bool:
        """Return whether an operator has the update of this step of the present branch skipped."""
        return self.skip_first <= step <= self.skip_last and self.skip_attempt == self.attempt


class Outlier(msgspec.Struct, frozen=True, array_like=True):
    """A step whose loss or gradient norm was above its limit."""

    step: int
    loss: float | None
    grad_norm: float | None
    withheld: bool


class LadderState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``decide`` carries from one step to the next."""

    facts: LadderMemory = LadderMemory()
    row: tuple[Outlier, ...] = ()
    """Outliers in a row, withheld or applied; a non-finite step in between is not counted."""
    nonfinite: int = 0
    """Non-finite steps in a row."""
    nonfinite_onset: int = -1
    sound: bool = False
    """Whether the probe read the state sound in this stretch of non-finite steps."""
    withheld: tuple[int, ...] = ()
    """Times of the updates that were withheld within the window."""
    asked: tuple[int, ...] = ()
    """Times of the questions to the probe about finite values within the window."""
    passes_until: int = 0
    """Outliers are applied before this time of the clock: the probe has answered."""
    state_told: int = -1
    """Step at which it was last told that the state is non-finite, and nothing went back."""
    state_since: int = -1
    """Step at which that was told first, of a stretch that has not ended."""
    replicas_told: int = -1
    """The same two steps of replicas that differ."""
    replicas_since: int = -1
    settings_since: int = -1
    """First step of this branch at which ranks had other settings; -1: none."""
    settings_told: int = -1
    """The newest such step."""
    num_missed: int = 0
    """Snapshots that could not be taken."""
    recent: tuple[Outlier, ...] = ()
    """The newest outliers, for an operator's word on one of them."""
    last_flagged: int = -1
    """The latest step that was not finite, or that a detector reported."""
    losses: tuple[float, ...] = ()
    """The newest finite losses since the last jump of the learning rate."""
    learning_rate: float = 0.0
    """As it was applied in the step before; 0 before the first."""
    known_rate: float = 0.0
    """The highest rate that was trained with, jumps once they are ``lr_jump_steps`` old."""
    lr_jump: LrJump | None = None
    announced_until: int = -1
    """Steps before this one were announced to change: nothing in them is a jump."""
    evaluated_at: int = -1
    """Step of the last evaluation."""
    accepted_at: int = -1
    """Step at which an operator last accepted a level."""
    first_step: int = -1
    """First step of this branch that was judged."""
    last_unhealthy_step: int = -1
    rolling_back: bool = False
    """A rollback was decided and not yet reported done: records are of the old branch."""

    @property
    def rate_to_know(self) -> float:
        """``known_rate`` as it is from the next step on: that of the newest step counts by then."""
        return max(self.known_rate, self.learning_rate if self.lr_jump is None else 0.0)


def in_turn(ladder: LadderState, before: LadderState) -> LadderState:
    """Return the state of one optimizer's own, as it is after ``before`` of another one.

    What describes the run goes from one to the other; rows and the count of what is withheld stay
    with the optimizer whose steps they are about.
    """
    return replace(
        ladder,
        facts=before.facts,
        first_step=before.first_step,
        last_flagged=max(ladder.last_flagged, before.last_flagged),
        announced_until=max(ladder.announced_until, before.announced_until),
        evaluated_at=max(ladder.evaluated_at, before.evaluated_at),
        asked=before.asked,
        passes_until=before.passes_until,
        last_unhealthy_step=max(ladder.last_unhealthy_step, before.last_unhealthy_step),
        rolling_back=before.rolling_back,
        state_told=before.state_told,
        state_since=before.state_since,
        replicas_told=before.replicas_told,
        replicas_since=before.replicas_since,
        settings_since=before.settings_since,
        settings_told=before.settings_told,
        num_missed=before.num_missed,
    )


def after_rollback(
    ladder: LadderState, *, attempt: int, step: int, known_rate: float
) -> LadderState:
    """Return the state a branch starts with: what was withheld and asked still counts."""
    return LadderState(
        facts=replace(ladder.facts, attempt=attempt),
        first_step=step,
        withheld=ladder.withheld,
        asked=ladder.asked,
        num_missed=ladder.num_missed,
        known_rate=known_rate,
    )


def lr_factor_at(
    facts: LadderMemory, step: int, rate: float | None = None, *, jump: float = 3.0
) -> float:
    """Return the factor on the learning rate at ``step``: held, climbing back, or 1.

    Args:
        facts: what the ladder has spent.
        step: the step.
        rate: what the schedule asks for; where it is above a hold, the factor brings it down.
        jump: multiple of the held rate from which it is held.
    """
    factor = _cut_at(facts, step) * facts.lr_scale
    if facts.lr_held and rate:
        return facts.lr_held / rate  # what a person set is what is applied
    if facts.lr_cap and rate is not None and rate >= jump * facts.lr_cap:
        factor *= facts.lr_cap / rate
    return factor


def _cut_at(facts: LadderMemory, step: int) -> float:
    if step >= facts.lr_full_from:
        return 1.0
    if step < facts.lr_hold_until:
        return facts.lr_factor
    part = (step - facts.lr_hold_until) / (facts.lr_full_from - facts.lr_hold_until)
    return facts.lr_factor + (1.0 - facts.lr_factor) * part


# ------------------------------------------------------------------------------------ withholding


MAX_RECENT = 128


class DeviceRule(msgspec.Struct, frozen=True):
    """What the device knows of the steps before: it need not wait for the host."""

    row: int = 0
    """Updates withheld in a row so far. A non-finite step neither counts nor ends the row."""

    def judge(
        self, record: StepRecord, limits: Limits, max_row: int, *, acts: bool
    ) -> tuple[StepRecord, DeviceRule]:
        """Return the record as the device completes it, and what it knows for the next step.

        This is ``trainer_hooks.step.reduce_vector.judge_on_device`` in plain numbers, for logs and
        tests.
        """
        loss_limit = limits.loss if record.loss_limit is None else record.loss_limit
        norm_limit = limits.grad_norm if record.grad_norm_limit is None else record.grad_norm_limit
        record = replace(record, loss_limit=loss_limit, grad_norm_limit=norm_limit)
        bad = bool(record.nonfinite_ranks) or _not_finite(record.loss)
        bad = bad or (_not_finite(record.grad_norm) and not record.overflow)
        withheld = is_outlier(record) and self.row < max_row
        skipped = record.skipped or record.overflow or (acts and (bad or withheld))
        record = replace(record, withheld=withheld, skipped=skipped)
        if bad or record.overflow or record.failed_ranks:
            return record, self
        return record, DeviceRule(self.row + 1 if withheld else 0)


def _not_finite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def is_outlier(record: StepRecord) -> bool:
    """Return whether a finite loss or norm was above the limit in force; unknown is no outlier."""
    if record.failed_ranks:
        return False
    return _is_above(record.loss, record.loss_limit) or (
        _is_above(record.grad_norm, record.grad_norm_limit) and not record.overflow
    )


def _is_above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and limit < value < math.inf


def limits_in_force(limits: Limits, state: LadderState, turn: int = 0) -> Limits:
    """Return the limits, raised to what an operator accepted."""
    for level in state.facts.accepted:
        if level.turn == turn:
            limits = Limits(
                _raised(limits.loss, level.loss), _raised(limits.grad_norm, level.grad_norm)
            )
    return limits


def _raised(limit: float | None, least: float) -> float | None:
    return None if limit is None else max(limit, least)


def max_row(state: LadderState, config: LadderConfig) -> int:
    """Return how many updates in a row the device may withhold; 0: outliers are applied.

    The host learns of a step one step late. The bound of a window holds all the same: the device
    counts the row itself, so with one update left it withholds none behind a step that the host
    has not seen.
    """
    clock = state.facts.clock
    if clock < state.passes_until:
        return 0
    row = 0
    for outlier in state.row:
        row = row + 1 if outlier.withheld else 0
    left = config.max_withheld - len(within_window(state.withheld, clock, config))
    return min(config.max_row, row + left)


def within_window(times: tuple[int, ...], clock: int, config: LadderConfig) -> tuple[int, ...]:
    """Return the times of the last ``withheld_window`` steps."""
    horizon = clock - config.withheld_window
    return tuple(time for time in times if time > horizon)


def note_outlier(state: LadderState, record: StepRecord, config: LadderConfig) -> LadderState:
    """Take a step that is above its limit into the row and the count of what was withheld."""
    clock = state.facts.clock
    outlier = Outlier(record.step, record.loss, record.grad_norm, record.withheld)
    withheld = within_window(state.withheld, clock, config)
    return replace(
        note_reported(state, record),
        row=(*state.row, outlier),
        withheld=(*withheld, clock) if record.withheld else withheld,
    )


def note_reported(state: LadderState, record: StepRecord) -> LadderState:
    """Take in a step that a detector reported: no state is proven healthy by it."""
    outlier = Outlier(record.step, record.loss, record.grad_norm, record.withheld)
    return replace(
        state,
        recent=(*state.recent, outlier)[-MAX_RECENT:],
        last_flagged=record.step,
        last_unhealthy_step=record.step,
    )


def ask_from(state: LadderState, config: LadderConfig) -> int:
    """Return the time of the clock from which the probe may be asked about finite values again.

    The pause doubles with each question in the window: 16, 32, 64 ... steps. That is at most six
    questions in 1,000 steps.
    """
    asked = within_window(state.asked, state.facts.clock, config)
    return asked[-1] + (config.ask_pause << (len(asked) - 1)) if asked else 0
