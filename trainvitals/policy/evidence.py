"""Evidence that a decision rests on: the step, the probe, and sentences about its result."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from trainvitals.detect.outliers import LossKind
from trainvitals.policy.state import CheckpointRef, Mode, PolicyConfig, PolicyState, Proposal
from trainvitals.records import Finding, StateRead, StepRecord
from trainvitals.units import humanize_count

Trigger = Literal["spike", "nonfinite", "level"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A query to the probe: loss of the current state on batches on which it was good before."""

    trigger: Trigger
    step: int
    """The step whose verdict needs the probe."""
    onset_step: int
    """First step of the problem; batches are taken from before it."""
    floor: float
    """Loss added to both sides of the ratio: a share of the run's first losses."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the probe, equal on all ranks. Losses are means over the losses of the ranks."""

    num_batches: int
    """Batches of 16 to 40 steps before the onset that every rank had kept and read. If there are
    fewer than three, the nearest ones of up to 100 steps before it."""
    then: float
    """Median of their losses at the time of training."""
    now: float
    """Median of their losses with the current state; NaN or Inf if one of them is non-finite."""
    older: float | None = None
    """The same ratio including batches of 64 and 256 steps before the onset, for the record."""
    detail: str = ""
    """The steps that were read, or the reason why none could be."""
    has_gradient: bool = True
    """Whether the gradient of one kept batch is finite on every rank, or unknown."""

    def ratio(self, floor: float) -> float | None:
        """Return the evidence of a probe: losses now / then; inf if non-finite, None if unknown.

        Fewer than three batches, or losses at or below zero, give no ratio.
        """
        if self.num_batches < MIN_BATCHES or not math.isfinite(self.then):
            return None
        if not self.has_gradient:
            return math.inf
        if self.then + floor <= 0.0:
            return None
        return (self.now + floor) / (self.then + floor) if math.isfinite(self.now) else math.inf


class StepInputs(NamedTuple):
    """Data that decides about a step in addition to its record; equal on all ranks."""

    decided_at_step: int
    """Step in whose call the decision is made."""
    checkpoints: Sequence[CheckpointRef] = ()
    """Possible targets of a rollback."""
    next_attempt: int = 0
    """Id of the attempt that a rollback would start."""
    command: Proposal | None = None
    """Manual command that is judged with the step."""
    unavailable_commands: Mapping[str, str] = MappingProxyType({})
    """Commands that the loop cannot carry out, with the reasons."""
    probe: Callable[[Ask], ProbeResult] | None = None
    """Evaluates the state; called during the decision, on all ranks in the same way."""
    evaluation: float | None = None
    """Ratio of an evaluation's loss to the previous one, with the floor; None: no evaluation."""
    written: Finding | None = None
    """Finding about weights that something else than the optimizer changed. Its text may differ."""
    collapse: Finding | None = None
    """Finding about a post-training run that was told to stop for it. Its text may differ."""
    moves_on: bool = False
    """Whether the loop keeps its data position in a rollback."""


class LossTrend(NamedTuple):
    """Earlier level of the loss: the reference of the outlier rule."""

    level: float
    noise: float
    first: float
    lowest: float = 0.0
    """The smallest of the losses that the level is the median of."""
    recent: float = 0.0
    """The median of the last eight losses."""


class DecisionContext(NamedTuple):
    """All that a decision about one step depends on, apart from the policy's memory."""

    record: StepRecord
    inputs: StepInputs
    mode: Mode = "guard"
    """Mode of the run: its most severe action."""
    config: PolicyConfig = PolicyConfig()
    loss_kind: LossKind = "minimize"
    loss_trend: Callable[[], LossTrend] = lambda: LossTrend(0.0, 0.0, 0.0)
    """A function, because the trend costs more than a step without findings."""

    @property
    def is_strict(self) -> bool:
        """Return whether no single update of the loop can explain a state that reads worse."""
        return self.record.clips or self.inputs.written is not None

    @property
    def can_roll_back(self) -> bool:
        """Return whether a rollback is the policy's next action in this mode."""
        return self.mode == "heal" or (self.mode == "observe" and bool(self.inputs.checkpoints))


MIN_BATCHES = 3
NO_READING = ProbeResult(num_batches=0, then=math.nan, now=math.nan, detail="no probe")

NONFINITE_GRADIENT = "the gradient on a kept batch is not finite"
_WORSE = "the state got worse on these batches, but not enough to prove damage"
_MEANINGS_OF_STATE: dict[tuple[str, str], str] = {
    ("spike", "sound"): "the state is healthy, so no update is withheld",
    ("nonfinite", "sound"): "the state is healthy, so updates are skipped, and nothing rolled back",
    ("level", "state"): "the state got worse on these batches",
    ("spike", "worse"): f"{_WORSE}; no update is withheld",
}
_MEANINGS = {"sound": "the state is healthy", "state": "the state is damaged", "worse": _WORSE}


def describe_reading(event: StateRead) -> str:
    """Describe the evidence from the probe or an evaluation in a sentence, with its numbers."""
    is_probe = event.trigger != "evaluation"
    who = "Probe" if is_probe else "Evaluation"
    if event.verdict == "abstained" or event.ratio is None:
        batches = humanize_count(event.num_batches, "kept batch", "kept batches")
        few = f"only {batches} could be evaluated; it needs 3"
        return f"{who}: no verdict: {event.detail or (few if is_probe else 'nothing to compare')}"
    numbers = [f"{event.num_batches} batches"] if is_probe else []
    numbers += [] if event.then is None else [f"{event.then:.4g} before"]
    numbers += [] if event.now is None else [f"{event.now:.4g} now"]
    if is_probe and len(numbers) > 1:
        numbers.append("a share of the initial loss added to both")
    shown = f" ({', '.join(numbers)})" if numbers else ""
    if event.detail.startswith(NONFINITE_GRADIENT):
        return f"{who}: {event.detail}{shown}: {describe_verdict(event)}"
    times = f"{event.ratio:.3g}x" if math.isfinite(event.ratio) else "NaN or infinite, against"
    what = "loss on kept batches is" if is_probe else "the loss is"
    earlier = "its earlier value" if is_probe else "that of the previous evaluation"
    return f"{who}: {what} {times} {earlier}{shown}: {describe_verdict(event)}"


def describe_verdict(event: StateRead) -> str:
    """Describe what a verdict about the state, as evidence, means for the run."""
    return _MEANINGS_OF_STATE.get((event.trigger, event.verdict), _MEANINGS[event.verdict])


# ------------------------------------------------------------------------------------- the probe


_ABSURD = 1e5
"""Multiple of the run's first losses above which a reading can only mean a damaged state."""
_FRESH_STEPS = 8
"""Steps after the first report in which a worse reading is damage; later it can be forgetting."""
LATE_STEPS = 32
"""Steps after an onset in which a run learns new data better than it remembers what it forgot."""
_MIN_UNDONE_RATIO = 1.25
"""Minimum ratio at which lost progress counts as damage."""
_MIN_UNDONE = 0.1
"""Least lost share of the progress: on memorized data one large step raises the loss 3.5 times."""
_LOST, _AS_BAD = 0.25, (0.8, 2.0)
"""Lost share of the progress, and its part in the latest losses: at most 0.65 if forgotten."""
_UNCLIPPED = 1.5
"""Multiple of the share of lost progress without a clip: healthy states spike higher there."""
_SUDDEN, _OWN = 0.8, (0.4, 2.0)
"""That multiple if kept batches rise as the first bad step does: below 0.32 after a new batch."""
_ONSET_TOLERANCE = 8
"""The onset of a level is accurate to this many steps."""


def run_probe(
    state: PolicyState, trigger: Trigger, onset: int, context: DecisionContext
) -> StateRead | None:
    """Query the probe for evidence; return its result with a verdict, or None without a probe."""
    config, probe, clips = context.config, context.inputs.probe, context.is_strict
    if probe is None:
        return None
    _, _, first, lowest, _ = context.loss_trend()
    floor = config.state_floor * first
    reading = probe(Ask(trigger=trigger, step=context.record.step, onset_step=onset, floor=floor))
    ratio, detail = reading.ratio(floor), reading.detail
    if ratio is not None and math.isfinite(ratio) and lowest < 0.0:
        # A loss that crosses zero, such as that of a Wasserstein GAN, may grow many times over.
        ratio, detail = None, "losses below zero have no ratio"
    verdict: Literal["state", "worse", "sound", "abstained"] = "abstained"
    if ratio is not None:
        gain = first - reading.then
        rise, own_rise = reading.now - reading.then, (context.record.loss or 0.0) - reading.then
        undone = rise / gain if gain > 0.0 else 0.0
        is_sudden = _OWN[0] * own_rise <= rise <= _OWN[1] * own_rise
        is_sudden = is_sudden and onset == context.record.step
        share = 1.0 if clips else _SUDDEN if is_sudden else _UNCLIPPED
        max_undone = config.state_progress * share
        is_undone = undone > max_undone and ratio > _MIN_UNDONE_RATIO
        # Without a clip one update on new data can undo enough progress to read as damage.
        min_undone = _MIN_UNDONE if clips or is_near_jump(state, onset, context) else max_undone
        is_far = ratio > max_healthy_ratio(state, onset, context)
        is_far = is_far and (gain <= 0.0 or undone > min_undone)
        is_worse = ratio > config.state_ratio
        is_damaged = math.isinf(ratio) or is_far or is_undone
        is_damaged |= is_worse and is_lost_everywhere(reading.now, reading.then, onset, context)
        verdict = "state" if is_damaged else "worse" if is_worse else "sound"
    return StateRead(
        trigger=trigger, onset_step=onset, num_batches=reading.num_batches, ratio=ratio,
        then=reading.then if math.isfinite(reading.then) else None,
        now=reading.now if reading is not NO_READING else None, verdict=verdict, detail=detail,
    )  # fmt: skip


def max_healthy_ratio(state: PolicyState, onset: int, context: DecisionContext) -> float:
    """Return the ratio of losses above which the policy takes the state as damaged."""
    config = context.config
    if is_near_jump(state, onset, context):
        return config.state_ratio_jump
    return config.state_ratio if context.is_strict else config.state_ratio_unclipped


def is_near_jump(state: PolicyState, onset: int, context: DecisionContext) -> bool:
    """Return whether the policy may attribute a problem with this onset to a jump of the rate."""
    jump = state.lr_jump
    if jump is None:
        return False
    return -_ONSET_TOLERANCE <= onset - jump.step <= context.config.lr_jump_steps


def proves_damage(
    read: StateRead, since: int, state: PolicyState, context: DecisionContext
) -> bool:
    """Return whether the reading is evidence of damage; forgetting would prove nothing.

    Earlier batches read worse after updates on new data. A few updates do not cause forgetting, and
    forgetting never leads to absurd losses or to non-finite gradients.
    """
    now = math.inf if read.now is None or not math.isfinite(read.now) else read.now
    if math.isinf(read.ratio or 0.0) or now > _ABSURD * context.loss_trend().first:
        return True
    if is_lost_everywhere(now, read.then or 0.0, read.onset_step, context):
        return True
    is_fresh = 0 <= since >= context.record.step - _FRESH_STEPS
    return is_fresh or is_near_jump(state, read.onset_step, context)


def is_lost_everywhere(now: float, then: float, onset: int, context: DecisionContext) -> bool:
    """Return whether the latest steps read as badly as earlier batches do, as evidence of damage.

    A run that forgot has learned the new data meanwhile: its latest steps read better.
    """
    trend, rise = context.loss_trend(), now - then
    if context.record.step - onset < LATE_STEPS or rise <= max(_LOST * (trend.first - then), 0.0):
        return False
    return _AS_BAD[0] <= (trend.recent - then) / rise <= _AS_BAD[1]


def describe_damage(read: StateRead) -> str:
    """Describe a reading that shows damage in a sentence, as evidence for decisions."""
    if read.ratio is None:
        return "the probe gave no verdict"
    if read.detail.startswith(NONFINITE_GRADIENT):
        return f"{NONFINITE_GRADIENT}: the state is damaged"
    return (
        f"the loss on {read.num_batches} earlier batches is {read.ratio:.3g}x what it was: the "
        "state is damaged"
    )


def damage_finding(
    read: StateRead, limit: float, context: DecisionContext, rank: int = -1
) -> Finding:
    """Return the finding whose evidence is a reading that shows damage."""
    return Finding(
        kind="state_damaged",
        level="actionable",
        step=context.record.step,
        detector="probe",
        reason=describe_damage(read),
        rank=rank,
        value=read.ratio,
        limit=limit,
        onset_step=read.onset_step,
        cause="state_damaged",
    )
