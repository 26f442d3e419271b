"""State of the escalation policy: memory, limits, withheld updates, learning-rate factor.

The memory has two parts. ``DurablePolicyState`` only moves forward (budgets spent, commands
applied, sequence number of the decision log): it is stored in the plan journal, and no restore
returns a budget. The rest of ``PolicyState`` describes the current attempt and is reset by a
rollback.

A finite outlier far above everything that the run has seen is withheld, within two bounds: two
updates in a row, then one is applied; and eight in 1,000 steps. After a withheld update the weights
are unchanged, so the next batch is an outlier too and the rule creates its own evidence: without
bounds a healthy run can freeze. All other outliers are only reported.
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
"""A step that is never reached."""

NEWEST = -1.0
"""Argument of a rollback to the latest healthy checkpoint."""


class PolicyConfig(Settings, frozen=True, kw_only=True):
    """When updates are withheld, when the run is rolled back, and the budget of each."""

    section = "ladder"
    removed = dict.fromkeys(
        ("max_firsts", "recurring_groups", "group_steps", "group_size"),
        "max_row and max_withheld limit the withheld updates",
    )

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
    that was applied. A run that has made progress must also have lost it, as in
    ``state_progress``."""
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
    spike began earlier. If none is that old: the oldest healthy state before the onset."""
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
    """Actions that wait for approval: every rollback, or those that lower the learning rate.
    Reply with ``vitals command RUN approve`` or ``veto``, or on the dashboard."""
    ask_steps: AtLeastOne = 500
    """Steps after which, without a reply, ``ask_default`` is applied. After a veto, at least as
    many steps pass before approval is requested again."""
    ask_default: Literal["approve", "veto"] = "approve"
    """Applied without a reply."""


class CheckpointRef(msgspec.Struct, frozen=True, kw_only=True):
    """A state to which a run can roll back. The list that the policy gets is equal on all ranks."""

    id: str
    step: int
    """Step trained next from it: the number of steps attempted before it."""
    attempt: int = 0
    state: CheckpointState = "healthy"
    where: Literal["memory", "disk"] = "memory"


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A verified command as all ranks know it after the exchange.

    If only numbers are exchanged, ``argument`` identifies the checkpoint of a rollback by its step;
    NEWEST requests the latest healthy one. Any number that is not the step of a checkpoint is
    refused, so send -2 for an id that rank 0 cannot resolve.
    """

    number: int
    action: CommandAction
    argument: float = NEWEST
    checkpoint_id: str = ""

    @classmethod
    def from_command(cls, command: Command) -> Proposal:
        """Return the part of a command that decides. A rollback without an id means the latest."""
        argument = NEWEST if command.action == "rollback" else command.argument
        return cls(
            number=command.number,
            action=command.action,
            argument=argument,
            checkpoint_id=command.checkpoint_id,
        )


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause that the policy currently treats."""

    kind: str
    onset_step: int
    until_step: int
    """A problem of the same kind before this step has the same cause."""
    tries: int = 1
    """Number of rollbacks for it."""
    target_step: int = -1
    """Step to which the last rollback went."""


class SkippedWindow(msgspec.Struct, frozen=True, array_like=True):
    """Data that training skipped."""

    onset_step: int
    """First step whose batches are skipped."""
    num_batches: int


class LrJump(msgspec.Struct, frozen=True, array_like=True):
    """The latest jump of the learning rate that was not announced."""

    step: int
    before: float
    after: float
    level: float
    """Median of the clean losses before it, their robust deviation, and the run's first losses."""
    noise: float
    first: float


class RollbackPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A rollback without its target, which is chosen again after an approval."""

    number: int = 0
    """Sequence number of its entry in the decision log, if it waits for approval."""
    until: int = 0
    """Time on the clock at which the default is applied, or a veto ends."""
    rule: str
    kind: str
    """Kind of the cause; only overlapping problems of one kind have one cause."""
    onset_step: int
    reason: str
    finding: Finding
    replay_all_batches: bool = msgspec.field(default=False, name="plays_all")
    """Every batch is trained again, because the cause is not the data."""
    is_finite: bool = False
    """Whether it rests on finite evidence, which has a cooldown."""
    jump: LrJump | None = None
    """The learning-rate jump that caused the problem."""
    vetoed: bool = False


class AcceptedLevel(msgspec.Struct, frozen=True, array_like=True):
    """Values that an operator accepted: no value up to them is withheld."""

    loss: float = 0.0
    """0 if the metric has no such value. The same applies to ``grad_norm``."""
    grad_norm: float = 0.0
    turn: int = 0
    """Optimizer of the steps; 0 if all optimizers step together."""


class DurablePolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the policy's memory that no restore resets. Stored in the plan journal."""

    attempt: int = 0
    """Id of the current attempt; 0 until the first record provides it."""
    clock: int = 0
    """Steps judged in all attempts: the unit of cooldowns and budgets."""
    ledger_seq: int = 0
    """Number of entries written to the decision log."""
    num_skips: int = 0
    num_rollbacks: int = 0
    causes: tuple[int, ...] = ()
    """Time of the first rollback for each cause, by the clock; only those within the window."""
    cause: Cause | None = None
    accepted: tuple[AcceptedLevel, ...] = ()
    """Levels that an operator accepted, at most one per optimizer."""
    blamed: tuple[int, ...] = ()
    """Onsets for which a rollback on finite evidence was spent: none is repeated."""
    corrupted: tuple[tuple[int, int], ...] = ()
    """Time of each rollback for replicas that differed, by the clock, and the wrong rank, -1 if
    unknown; only those within the window."""
    uncured_until: int = 0
    """No rollback for a non-finite state before this time on the clock: one did not fix it."""
    cooldown_until: int = 0
    """No rollback on finite evidence before this time on the clock."""
    last_command: int = 0
    """Number of the latest command with a response."""
    skipped_windows: tuple[SkippedWindow, ...] = ()
    """The latest 100 of them."""
    lr_factor: float = 1.0
    lr_hold_until: int = 0
    """Step up to which the learning rate is multiplied by ``lr_factor``."""
    lr_full_from: int = 0
    """Step from which the rate is complete again; between the two it rises linearly."""
    lr_cap: float = 0.0
    """Rate before a jump, held while the schedule requests ``lr_jump`` times it; 0: no hold."""
    lr_cap_from: int = 0
    """Step of that jump: before it, a lower rate does not end the hold."""
    lr_scale: float = 1.0
    """An operator's factor on the scheduled learning rate, until the next command."""
    lr_held: float = 0.0
    """Learning rate that an operator holds; 0: the scheduled rate applies."""
    skip_attempt: int = 0
    """Attempt on which an operator skips updates; the range applies to no other attempt."""
    skip_first: int = 0
    skip_last: int = -1
    """First and last of those steps."""
    waiting: RollbackPlan | None = None
    """A rollback that waits for approval."""
    halted: str = ""
    """Reason why the policy halted the run, or empty."""

    def is_skipped(self, step: int) -> bool:
        """Return whether an operator's command skips this step's update in this attempt."""
        return self.skip_first <= step <= self.skip_last and self.skip_attempt == self.attempt


class Outlier(msgspec.Struct, frozen=True, array_like=True):
    """A step whose loss or gradient norm was above its limit."""

    step: int
    loss: float | None
    grad_norm: float | None
    withheld: bool


REPORT_AGAIN_STEPS = 50
"""Steps after which a lasting problem is reported again: its alert would resolve after 100."""


class LastingProblem(msgspec.Struct, frozen=True, array_like=True):
    """A problem that is reported at its first step, and again while it lasts."""

    reported_step: int = -1
    """Step of the latest report; -1 if there was none."""
    since: int = -1
    """First step of the problem."""

    def report(self, step: int) -> LastingProblem | None:
        """Return the problem's state after the policy reports it; None if it did so recently."""
        passed = step - self.reported_step if self.reported_step >= 0 else FOREVER
        if passed < REPORT_AGAIN_STEPS:
            return None
        return LastingProblem(step, self.since if passed <= 2 * REPORT_AGAIN_STEPS else step)


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """State that ``decide`` carries from one step to the next."""

    facts: DurablePolicyState = DurablePolicyState()
    row: tuple[Outlier, ...] = ()
    """Outliers in a row, withheld or applied; a non-finite step in between is not counted."""
    nonfinite: int = 0
    """Non-finite steps in a row."""
    nonfinite_onset: int = -1
    sound: bool = False
    """Whether the probe found the state healthy in this row of non-finite steps."""
    withheld: tuple[int, ...] = ()
    """Times of the updates withheld within the window."""
    asked: tuple[int, ...] = ()
    """Times of the queries to the probe about finite values within the window."""
    passes_until: int = 0
    """Outliers are applied before this time on the clock: the probe has responded."""
    hidden: LastingProblem = LastingProblem()
    """Reports of a non-finite state without a rollback."""
    replicas: LastingProblem = LastingProblem()
    """Reports of replicas that differ without a rollback."""
    settings: LastingProblem = LastingProblem()
    """Settings of ranks that differ in this attempt: the latest such step, and the first."""
    num_missed: int = 0
    """Snapshots that could not be taken."""
    recent: tuple[Outlier, ...] = ()
    """The latest outliers, for an operator who accepts one of them."""
    last_flagged: int = -1
    """The latest step that was non-finite, or that a detector reported."""
    suspected: int = -1
    """Onset of damage that a reading showed and did not prove."""
    learning_rate: float = 0.0
    """Rate applied in the step before; 0 before the first step."""
    known_rate: float = 0.0
    """Highest rate used in training; a jump counts once it is ``lr_jump_steps`` old."""
    lr_jump: LrJump | None = None
    announced_until: int = -1
    """Changes before this step were announced: none of them is a jump."""
    evaluated_at: int = -1
    """Step of the last evaluation."""
    accepted_at: int = -1
    """Step at which an operator last accepted a level."""
    first_step: int = -1
    """First judged step of this attempt."""
    last_unhealthy_step: int = -1
    rolling_back: bool = False
    """A rollback was decided and not yet reported done: records belong to the old attempt."""

    @property
    def rate_to_know(self) -> float:
        """Return the policy's ``known_rate`` from the next step on, with the latest step's rate."""
        return max(self.known_rate, self.learning_rate if self.lr_jump is None else 0.0)


def carry_run_state(state: PolicyState, before: PolicyState) -> PolicyState:
    """Return one optimizer's policy state, updated from ``before``, the state of another one.

    Fields about the run are taken from ``before``; rows and the count of withheld updates stay with
    the optimizer whose steps they describe.
    """
    return replace(
        state,
        facts=before.facts,
        first_step=before.first_step,
        last_flagged=max(state.last_flagged, before.last_flagged),
        announced_until=max(state.announced_until, before.announced_until),
        evaluated_at=max(state.evaluated_at, before.evaluated_at),
        asked=before.asked,
        passes_until=before.passes_until,
        last_unhealthy_step=max(state.last_unhealthy_step, before.last_unhealthy_step),
        rolling_back=before.rolling_back,
        hidden=before.hidden,
        replicas=before.replicas,
        settings=before.settings,
        num_missed=before.num_missed,
    )


def after_rollback(
    state: PolicyState, *, attempt: int, step: int, known_rate: float
) -> PolicyState:
    """Return the policy's state at the start of an attempt; withheld updates still count."""
    return PolicyState(
        facts=replace(state.facts, attempt=attempt),
        first_step=step,
        withheld=state.withheld,
        asked=state.asked,
        num_missed=state.num_missed,
        known_rate=known_rate,
    )


def lr_factor_at(
    facts: DurablePolicyState, step: int, rate: float | None = None, *, jump: float = 3.0
) -> float:
    """Return the policy's factor on the learning rate at ``step``: held, rising again, or 1.

    Args:
        facts: memory of the policy.
        step: the step.
        rate: rate that the schedule requests; if it is above a hold, the factor lowers it.
        jump: multiple of the held rate from which it is held.
    """
    factor = _compute_lr_cut(facts, step) * facts.lr_scale
    if facts.lr_held and rate:
        return facts.lr_held / rate  # the rate that the operator set applies exactly
    if facts.lr_cap and rate is not None and rate >= jump * facts.lr_cap:
        factor *= facts.lr_cap / rate
    return factor


def _compute_lr_cut(facts: DurablePolicyState, step: int) -> float:
    """Return the factor to which the policy cut the learning rate, at ``step``."""
    if step >= facts.lr_full_from:
        return 1.0
    if step < facts.lr_hold_until:
        return facts.lr_factor
    part = (step - facts.lr_hold_until) / (facts.lr_full_from - facts.lr_hold_until)
    return facts.lr_factor + (1.0 - facts.lr_factor) * part


# ------------------------------------------------------------------------------------ withholding


MAX_RECENT = 128
MAX_BLAMED = 100
_GROUP_STEPS = 10
"""Steps without an outlier that end a group, for an operator who accepts one of them."""


class DeviceRule(msgspec.Struct, frozen=True):
    """State of the device about earlier steps, so that it need not wait for the host."""

    row: int = 0
    """Updates withheld in a row so far. A non-finite step neither counts nor ends the row."""

    def judge(
        self, record: StepRecord, limits: Limits, max_row: int, *, acts: bool
    ) -> tuple[StepRecord, DeviceRule]:
        """Apply the policy's rule on the device: return the completed record and the next state.

        Same rule as ``trainer_hooks.exchange.reduce_vector.judge_on_device``, with plain numbers,
        for logs and tests.
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
    """Return whether a value that the policy judges is NaN or infinite; False if unknown."""
    return value is not None and not math.isfinite(value)


def is_outlier(record: StepRecord) -> bool:
    """Return whether a step counts as an outlier for the policy: above the limit in force."""
    if record.failed_ranks:
        return False
    return _is_above(record.loss, record.loss_limit) or (
        _is_above(record.grad_norm, record.grad_norm_limit) and not record.overflow
    )


def _is_above(value: float | None, limit: float | None) -> bool:
    """Return whether a finite value is above the limit that the policy set."""
    return value is not None and limit is not None and limit < value < math.inf


def limits_in_force(limits: Limits, state: PolicyState, turn: int = 0) -> Limits:
    """Return the policy's limits, raised to what an operator accepted by command."""
    for level in state.facts.accepted:
        if level.turn == turn:
            limits = Limits(
                _raise_limit(limits.loss, level.loss),
                _raise_limit(limits.grad_norm, level.grad_norm),
            )
    return limits


def _raise_limit(limit: float | None, least: float) -> float | None:
    """Return a limit of the policy, raised to an accepted value; None without a limit."""
    return None if limit is None else max(limit, least)


def max_row(state: PolicyState, config: PolicyConfig) -> int:
    """Return how many updates in a row the policy lets the device withhold; 0: none.

    The host sees a step one step late. The bound of a window holds nevertheless: the device counts
    the row itself, so with one update left it withholds none after a step that the host has not
    seen.
    """
    clock = state.facts.clock
    if clock < state.passes_until:
        return 0
    row = 0
    for outlier in state.row:
        row = row + 1 if outlier.withheld else 0
    remaining = config.max_withheld - len(within_window(state.withheld, clock, config))
    return min(config.max_row, row + remaining)


def within_window(times: tuple[int, ...], clock: int, config: PolicyConfig) -> tuple[int, ...]:
    """Return the times, by the policy's clock, within the last ``withheld_window`` steps."""
    if not times:
        return times
    horizon = clock - config.withheld_window
    return tuple(time for time in times if time > horizon)


def note_outlier(state: PolicyState, record: StepRecord, config: PolicyConfig) -> PolicyState:
    """Add an outlier to the policy's row, and to its withheld updates if it was one."""
    clock = state.facts.clock
    outlier = Outlier(record.step, record.loss, record.grad_norm, record.withheld)
    withheld = within_window(state.withheld, clock, config)
    return replace(
        note_reported(state, record),
        row=(*state.row, outlier),
        withheld=(*withheld, clock) if record.withheld else withheld,
    )


def note_reported(state: PolicyState, record: StepRecord) -> PolicyState:
    """Record for the policy a step that a detector reported: it proves no state healthy."""
    outlier = Outlier(record.step, record.loss, record.grad_norm, record.withheld)
    return replace(
        state,
        recent=(*state.recent, outlier)[-MAX_RECENT:],
        last_flagged=record.step,
        last_unhealthy_step=record.step,
    )


def outliers_around(state: PolicyState, step: int) -> tuple[Outlier, ...]:
    """Return the outliers that the policy remembers around a step, close to each other."""
    groups: list[list[Outlier]] = []
    for outlier in state.recent:
        if not groups or outlier.step - groups[-1][-1].step > _GROUP_STEPS:
            groups.append([])
        groups[-1].append(outlier)
    for group in reversed(groups):
        if group[0].step - _GROUP_STEPS <= step <= group[-1].step + _GROUP_STEPS:
            return tuple(group)
    return ()


def next_probe_clock(state: PolicyState, config: PolicyConfig) -> int:
    """Return when, on the policy's clock, the probe may run again for finite values.

    The pause doubles with each query in the window: 16, 32, 64 ... steps. Those about a suspicion,
    every 8 steps for 32, neither wait for it nor make it longer.
    """
    times = within_window(state.asked, state.facts.clock, config)
    return times[-1] + (config.ask_pause << (len(times) - 1)) if times else 0
