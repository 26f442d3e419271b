"""The life of an alert, and what becomes one. Reads no clock, sends nothing.

Severity says who must act: *page* a human, now; *notify* nobody, Vitals acted; *log* nobody, it was
one step. Point events (a decision) fire at once and resolve after the run stayed healthy for some
steps; conditions (a lost run) resolve when the condition ends.
"""

import enum
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from trainvitals.detect.registry import KINDS, finding_alert_name
from trainvitals.errors import ConfigError
from trainvitals.records import ActionName, Decision, Finding, Severity
from trainvitals.views import RunState


class AlertState(enum.StrEnum):
    """State of an alert."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertStatus:
    """An alert's state, and since when its condition holds."""

    state: AlertState = AlertState.INACTIVE
    active_since: float | None = None


def advance(status: AlertStatus, *, breached: bool, now: float, hold_seconds: float) -> AlertStatus:
    """Return the alert's next status.

    A condition must hold for ``hold_seconds`` before it fires (0: at once); one that ends while
    pending leaves no trace; one that fired is resolved. Setting the clock back restarts the hold.
    """
    if not breached:
        was_firing = status.state is AlertState.FIRING
        return AlertStatus(state=AlertState.RESOLVED if was_firing else AlertState.INACTIVE)
    since = now if status.active_since is None else min(now, status.active_since)
    is_held_long_enough = status.state is AlertState.FIRING or now - since >= hold_seconds
    return AlertStatus(
        state=AlertState.FIRING if is_held_long_enough else AlertState.PENDING, active_since=since
    )


def fingerprint(name: str, labels: Mapping[str, str]) -> str:
    """Return 16 hexadecimal characters that identify an alert by name and labels."""
    text = json.dumps([name, sorted(labels.items())], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


NO_ACTION = "took no action; training continues."
HEALTHY_AGAIN = "100 healthy steps have passed without it, or the run has finished."


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSpec:
    """One alert Vitals can raise. Its texts are written for an operator at 3 a.m."""

    name: str
    severity: Severity
    help: str
    """Meaning."""
    to_do: str
    """What to do; RUN in a command is the run's id."""
    point: bool
    """A point event: resolves after healthy steps. Otherwise when the run's state changes."""
    did: str = NO_ACTION
    """What Vitals did, as the end of a sentence that starts with its name."""
    ends: str = HEALTHY_AGAIN
    """When it resolves, as the end of a sentence; a condition has its own text."""


_ALERT_TABLE = """
TrainingHalted: page
    The run no longer made healthy progress, or an operator halted it.
    did: halted the run.
    to do: Read `vitals postmortem RUN`, fix the cause, then run `vitals resume RUN` and start the
        job again.
    ends: the run is resumed.
RunLost: page
    A running job stopped reporting without a clean exit.
    did: cannot act on a job that does not report.
    to do: Check its nodes and its log, then restart the job. If it ended while no collector was
        running, `vitals agent --dir DIR` on its node sends the remaining rows.
    ends: the run reports again.
NodeLost: page
    A node of a running job does not report, neither its agent nor its ranks. The other ranks cannot
        finish a step without it.
    did: cannot act on a node that does not report.
    to do: Check the node, then restart the job.
    ends: the node reports again, the job is restarted, or the run has ended.
RankLost: page
    A rank's process ended without a clean exit while the job continues; the others wait for it.
    did: cannot act on a process that has ended.
    to do: Check the rank's log and its node, then restart the job.
    ends: the rank reports again, the job is restarted, or the run has ended.
AgentLost: notify
    A node does not report while the run continues with its ranks: training is fine, but its agent
        or its network is not. The journal keeps rows up to its size limit.
    to do: Restart the agent, or fix the node's network.
    ends: the node reports again, the job is restarted, or the run has ended.
StreamStopped: page
    Rows of one stream are not stored: the collector refuses them, the agent serves another node
        than the ranks', or another writer used that stream, by mistake or with a stolen token.
        Curves and detectors lack these rows.
    did: stopped sending that stream; its rows stay in the node's spool.
    to do: Read its message. V241: restore `writer.key` in the agent's directory, or restart the
        job, because each start has new streams. If another writer used the stream, replace the
        ingest token (`vitals token create`), and restart the job.
ReceiverFailing: page
    An alert has waited for a receiver for 5 minutes, or the receiver refused 10 deliveries in a
        row.
    did: keeps trying, and alerts all other receivers.
    to do: Check its URL and its token; `vitals alerts test` shows its response.
    ends: the receiver accepted all pending alerts, or is no longer configured.
RollbackBudgetLow: page
    The rollback budget is used up: the next incident halts the run.
    did: rolled back; the budget allows no further rollback.
    to do: Find the cause before the next incident: `vitals postmortem RUN`.
StateDamaged: page
    The loss on earlier batches is far higher than it was, so the weights are damaged, and Vitals
        did not roll back (mode `guard`, or no checkpoint).
    did: did not roll back; training continues with the damaged weights.
    to do: Restart from a checkpoint before the onset (`vitals checkpoints list RUN`); if the run is
        healthy, `vitals command RUN accept STEP`.
Unguarded: page
    10 or more steps could not be measured, so the guard is not in force: a NaN would reach the
        weights.
    did: applied these updates unchecked; training continues.
    to do: Read the error in the event `unguarded` or in the training's log, and fix its cause or
        report it; `vitals why RUN STEP` shows a step.
ZeroGradient: notify
    All gradients were exactly 0 for 5 steps in a row (50 if the loss was 0 as well, or is not
        minimized), so the run trains nothing.
    to do: Look for frozen parameters, a detached loss, dead activations, or half-precision
        gradients too small without a `GradScaler`.
NonFiniteState: page
    Optimizer state, buffers or unused parameters are NaN or infinite while the loss is finite, and
        Vitals did not roll back (mode `guard`, or a rollback did not fix it). In mode `heal` no
        snapshot or checkpoint is made while a trained tensor is non-finite. The event
        `nonfinite_state` names the tensors.
    did: did not roll back; training continues.
    to do: Restart from a checkpoint. If the model itself sets a buffer to Inf, ignore it: snapshots
        continue.
ReplicaCorrupted: page
    Parameters, optimizer state or averages that must be equal on several ranks are not, and Vitals
        did not roll back (mode `guard` or `observe`, no budget left, or the same difference
        recurred bit for bit). The finding names the rank, node, GPU and tensor.
    did: did not roll back; training continues, and no snapshot or checkpoint is made.
    to do: Restart from an earlier checkpoint, without the named node. `vitals why RUN STEP` shows
        the elements, and `vitals doctor --burn-in 60` tests that node. If the loop writes
        parameters on one rank only, fix the loop.
ReductionWrong: page
    The averaged gradients of a rank, or of all, are not the sum of what the ranks put in
        (`SignalSettings(reduction=True)`): a link, a network card or the reduction is faulty.
    to do: Check the error counters of the named rank's link, and test its node with `vitals doctor
        --burn-in 60`. If the loss has changed, restart from an earlier checkpoint.
SettingsDiffer: page
    Ranks that train one model have different settings: a learning rate, a weight decay, a
        `max_norm` or a sampler's seed. Their parameters drift apart, or samples repeat.
    to do: `vitals why RUN STEP` names the rank and the setting. Make it equal on all ranks and
        restart from an earlier checkpoint.
NonFiniteStreak: page
    32 losses in a row were NaN or infinite while the weights are healthy: the run makes no
        progress.
    did: skips every update.
    to do: Check the data, and the loss function for a division or a logarithm of zero.
ProgressLost: page
    For 100 steps the loss has been above 90% of its earlier improvement.
    to do: Restart from an older checkpoint; if this is intended, `vitals command RUN accept STEP`.
LearningRateHeld: page
    A learning-rate jump damaged the model. The earlier rate holds until the schedule asks for less
        than 3 times that.
    did: rolled back, and holds the earlier learning rate.
    to do: Fix the schedule, or announce the jump with `monitor.expect(...)`.
TrainingRolledBack: notify
    The training state was damaged.
    did: rolled back to a healthy state; training continues.
    to do: No action needed; `vitals postmortem RUN` has the cause.
LevelShiftAccepted: notify
    An operator accepted a level of the loss or of the gradient norm.
    did: accepted the new level as normal.
    to do: No action needed.
SnapshotMissed: notify
    A snapshot in memory could not be taken, so a rollback would go further back.
    to do: The event `snapshot_missed` has the reason, usually too little memory: free it.
ApprovalNeeded: page
    A rollback needs approval, because the setting `[ladder] ask` lists it.
    did: waits for approval before it rolls back; after `ask_steps` it applies `ask_default`.
    to do: Run `vitals command RUN approve` or `vitals command RUN veto`, or use the Decisions page.
TroubleObserved: notify
    Vitals would have rolled back or halted, but its mode is `observe`.
    to do: Read `vitals why RUN STEP`; to let Vitals act, restart the run in mode `heal`.
RunFailed: notify
    The training program ended with an error.
    did: recorded how the job ended.
    to do: Read its traceback, then restart it.
    ends: the run is resumed.
RunOverCap: notify
    A run exceeds its disk cap, and none of the remaining rows may be rolled up.
    did: rolled up all rows that its settings allow.
    to do: Raise the cap (`vitals collector --cap-gb`), or delete an ended run (`vitals store
        delete`).
    ends: the run is below its cap.
StepSkipped: log
    One update would have harmed the model.
    did: skipped the update.
    to do: No action needed.
LossDiverged: notify
    The loss rose and stays above its lowest level.
    to do: Check the learning rate and the data; if it is intended, `vitals command RUN accept
        STEP`.
LossPlateau: notify
    The loss never fell, is stuck since a restart, or rose and did not recover.
    to do: Check learning rate and data, or restart from an older checkpoint.
LossCollapsed: notify
    The loss fell to zero, or far below its usual values. If these were below a tenth of the first
        losses, it is only logged.
    to do: Check for label leakage, empty batches or a masked loss.
GradientExplosion: notify
    The gradient norm rose over several steps, to 8 times its median or more; a loss spike often
        follows. A smaller rise is only logged.
    to do: Watch the loss; lower the learning rate if it rises.
LearningRateAnomaly: notify
    The learning rate changed in a way that no usual schedule does.
    to do: Check the scheduler and how it is resumed. If it is intended, use watch(schedule=...).
WeightNormMoved: notify
    The norm of all weights grows or shrinks much faster than it did before.
    to do: Check the weight decay of every parameter group, and what else writes to the weights.
        `vitals show RUN --metric steps.weight_norm` shows when it began.
PolicyCollapsed: notify
    The policy became nearly deterministic, and its reward did not rise, was lost, or its
        completions no longer end.
    to do: Go back to a checkpoint before the entropy fell. Lower the learning rate or raise beta;
        check that the reward has a signal that no fixed text satisfies.
RewardDead: notify
    In nearly all groups the completions have equal rewards, so there is no gradient. The reward was
        lost, or no group ever had a gradient.
    to do: Read some completions with their rewards. Check the reward's parser; filter prompts that
        always or never succeed; raise the temperature or the completions per prompt.
PolicyDiverged: notify
    The policy moves away from its reference, and the reward does not rise or was lost.
    to do: Raise beta or lower the learning rate, and continue from the checkpoint with the best
        reward.
CompletionsCut: notify
    Nearly all completions are cut at the length limit, and the reward does not rise or was lost.
    to do: Read some completions. Check the end-of-sequence token of the chat template and the
        length limit; penalize or mask cut completions.
RewardHacked: notify
    The training reward is at its best while a held-out reward was lost.
    to do: Read the completions with the highest rewards, close the gap of the reward, and continue
        from the checkpoint with the best held-out reward.
PolicyUpdateTooLarge: notify
    The updates of a batch move the policy too far from the one that sampled it.
    to do: Lower the learning rate or the number of updates per batch; use fresher samples.
SamplerDiffers: notify
    The sampler's log-probabilities differ from the trainer's: the samples are not from the policy
        that is trained.
    to do: Check that new weights reach the sampler, and that precision, quantization, temperature
        and chat template are the same in both.
ChosenImprobable: notify
    In preference training the chosen completions become improbable, like the rejected ones.
    to do: Lower the learning rate, raise beta, or add an SFT term to the loss.
PreferenceLeaked: notify
    Nearly all preference pairs are ranked correctly from the start: they differ in something
        trivial.
    to do: Compare some pairs as tokens: template, length, marks, and whether the model was trained
        on them.
LossScaleCollapsed: notify
    The gradient scaler found no scale without overflow, so updates are skipped.
    to do: Train in bf16; otherwise look for an overflow in the model.
LossScaleOverflows: log
    The gradient scaler overflows too often, so many updates are skipped.
    to do: Consider bf16.
ThroughputFell: notify
    Training is slower than it was (not counting evaluations and checkpoints).
    to do: Look for a slow rank, a slow loader or throttled GPUs: `vitals show RUN`.
DataBound: notify
    Steps wait for batches: the data loader is too slow.
    to do: Give the loader more workers, or faster storage.
StragglerRank: notify
    All ranks wait for one slow rank.
    to do: The message names the slow part: data, loop, GPU clocks or link. Fix that one.
MemoryCreep: notify
    Device memory rises steadily and will run out.
    to do: Look for tensors that the loop keeps, such as losses in a list.
TrainingStalled: page
    No step has finished for far too long, but the job is alive. A collective may hang.
    did: took no action; the job still waits.
    to do: `vitals stacks RUN` shows the stack of each rank; then restart the job.
    ends: a step finishes, or the run has ended.
RankHung: page
    All ranks wait for one that is stopped, dead or blocked, or that has been computing for far
        longer than the others ever had to wait before.
    did: took no action; the job still waits.
    to do: `vitals why RUN STEP` shows the stacks of its node's ranks; then restart the job. With
        `on_hang="restart"` wait for one minute: Vitals ends most hung jobs itself, and
        `HungJobEnded` follows.
HungJobEnded: notify
    A job hung, and the page `RankHung` was not resolved for one minute.
    did: ended the job, because `on_hang` is `restart`; its launcher starts it again.
    to do: Check that it trains again: `vitals tail RUN`. `vitals why RUN STEP` names the blocking
        rank and shows its stack; if it recurs, drain that rank's node. After three such restarts
        per day, a hang only pages.
CheckpointOverdue: notify
    No checkpoint was written for twice the usual interval.
    to do: Check the disk, and the log of rank 0 for failed saves.
    ends: a checkpoint is written, or the run has ended.
GpuFault: notify
    A GPU reported a fatal Xid or an uncorrected memory error.
    to do: Drain its node.
GpuLost: notify
    A GPU stopped responding; it may have fallen off the bus.
    to do: Drain its node.
GpuThrottled: notify
    A GPU is throttled because of heat or power, and the others wait for it.
    to do: Check its cooling.
GpuErrors: log
    A GPU reported an application Xid, or many corrected memory errors.
    to do: Drain its node if this recurs.
GpuPowerCapped: log
    A GPU runs far below its usual clock because of its power limit.
    to do: Check its power limit.
SpikeSeen: log
    The loss or gradient norm was far above its usual values.
    did: decided about the update in the step's decision.
    to do: No action needed; `vitals why RUN STEP` shows whether the update was applied.
RankLossApart: log
    One rank's loss keeps differing from the others'.
    to do: Check its data and its hardware.
LayerOutlier: log
    One layer's gradients or updates are unusual while the others are not.
    to do: If the loss rises, inspect this layer.
ActivationsGrew: log
    A module's output grew by an order of magnitude or more since warm-up.
    to do: Watch the loss; lower the learning rate if it rises.
ActivationsCollapsed: log
    A module's output fell by an order of magnitude since warm-up, or nearly all of its features are
        0 for the whole batch.
    to do: Restart from an earlier checkpoint with a lower learning rate: dead ReLUs get no gradient
        and rarely recover.
UserAlert: notify
    A rule of the settings file or `monitor.alert` in the training loop raised it. Its cause is the
        name you gave it, and its severity the level.
    to do: Read its message and its value; `vitals why RUN STEP` shows the other findings.
"""
"""Per alert its name and severity, meaning, what Vitals did, what to do, and when it resolves.

By default Vitals did nothing; only a condition has its own end. A deeper line continues the one
above it."""
_LABELS = ("did", "to do", "ends")


def _read_alert(entry: str) -> AlertSpec:
    """Return one alert of the table."""
    head, *lines = re.split(r"\n {4}(?! )", entry)
    name, severity = head.split(": ")
    texts = {"did": NO_ACTION, "ends": HEALTHY_AGAIN}
    for line in lines:
        text = " ".join(line.split())
        label = next((label for label in _LABELS if text.startswith(f"{label}: ")), "help")
        texts[label] = text.removeprefix(f"{label}: ")
    return AlertSpec(
        name=name,
        severity=msgspec.convert(severity, Severity),
        help=texts["help"],
        to_do=texts["to do"],
        point=texts["ends"] == HEALTHY_AGAIN,
        did=texts["did"],
        ends=texts["ends"],
    )


ALERTS = tuple(map(_read_alert, re.split(r"\n(?! )", _ALERT_TABLE.strip())))
"""Every alert; docs and rules are derived from it."""

RUNBOOK = "docs/RUNBOOK.md"
"""Path of the runbook in this project; each alert has a section with its name."""

ABSENCE_ALERTS = ("NodeLost", "RankLost", "AgentLost")
"""Alerts about a lost part of a run; their cause names it."""
_MOST_PARTS = 8
"""Parts that have an alert each; all others share one: a dead rack is not a hundred pages."""

ALERTS_BY_NAME = {spec.name: spec for spec in ALERTS}

ALERTED_KINDS = frozenset(kind.name for kind in KINDS.values() if kind.alert)
"""Kinds of findings that raise an alert themselves. Others are reported by the decision they lead
to: a skip, a rollback, an accepted level."""

_ENDED_BY: dict[str, frozenset[ActionName]] = {"state_damaged": frozenset({"rollback", "halt"})}
"""Kinds that only some actions end: a skipped update does not repair a model."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert when it is raised."""

    name: str
    severity: Severity
    labels: dict[str, str]
    summary: str
    step: int = -1
    point: bool = False
    rank: int = -1
    """The rank that raised it, if each rank raises it separately."""

    @property
    def fingerprint(self) -> str:
        """The alert's identity: raised again, it is the same alert."""
        return fingerprint(self.name, self.labels)


_ALERT_OF_ACTION: dict[ActionName, str] = {
    "halt": "TrainingHalted",
    "restart": "HungJobEnded",
    "accept_level": "LevelShiftAccepted",
    "skip_step": "StepSkipped",
}
_ALERT_OF_STATE: dict[RunState, tuple[str, str]] = {
    "lost": ("RunLost", "the run stopped reporting"),
    "halted": ("TrainingHalted", "the run halted"),
    "failed": ("RunFailed", "the run ended with an error"),
}


def alerts_for_decision(decision: Decision, *, run_id: str) -> tuple[Alert, ...]:
    """Return the alerts of a decision; in ``observe`` only the serious ones."""
    step, reason = decision.step, decision.reason
    if decision.action == "continue":
        return ()
    if decision.mode == "observe":
        if decision.action not in ("rollback", "halt"):
            return ()
        return (
            _build_alert("TroubleObserved", run_id, f"would {decision.action}: {reason}", step),
        )
    if not decision.acted:
        return ()  # it waits for approval, which a finding reports, or the loop had ended
    if decision.action in _ALERT_OF_ACTION:
        cause = "" if decision.action == "halt" else decision.cause
        return (_build_alert(_ALERT_OF_ACTION[decision.action], run_id, reason, step, cause),)
    raised = [_build_alert("TrainingRolledBack", run_id, reason, step, decision.cause)]
    if decision.rule == "lr_jump":
        raised.append(_build_alert("LearningRateHeld", run_id, reason, step))
    if decision.budget_left == 0:
        low = f"Rollback budget used up; the last one: {reason}"
        raised.append(_build_alert("RollbackBudgetLow", run_id, low, step))
    return tuple(raised)


def is_answered(finding: Finding, actions: Collection[str]) -> bool:
    """Return whether the decisions about a finding's step already report it.

    Args:
        finding: report of a detector.
        actions: the actions of the decisions about its step.
    """
    answers = _ENDED_BY.get(finding.kind)
    if answers is not None:
        return not answers.isdisjoint(actions)
    return finding.level == "actionable" and bool(actions)


def alerts_for_finding(
    finding: Finding, *, run_id: str, loss_kind: str = "minimize"
) -> tuple[Alert, ...]:
    """Return the alerts that a finding raises itself: once for each cause, while it fires.

    Args:
        finding: report of a detector.
        run_id: the run.
        loss_kind: the run's loss; for "rl" and "adversarial" a level is only logged.
    """
    cause = finding.cause or finding.kind
    name = finding_alert_name(finding.kind, cause)
    if not name:
        return ()
    label = finding.kind if KINDS[finding.kind].has_one_alert else cause
    alert = _build_alert(name, run_id, finding.reason, finding.step, label)
    if finding.severity:
        alert = msgspec.structs.replace(alert, severity=finding.severity, rank=finding.rank)
    if loss_kind != "minimize" and KINDS[finding.kind].is_of_the_level:
        alert = msgspec.structs.replace(alert, severity="log")
    return (alert,)


def alerts_for_run_state(
    state: RunState, *, run_id: str, step: int = -1, reason: str = ""
) -> tuple[Alert, ...]:
    """Return the alerts that hold while a run is in ``state``; the others of the run's are over."""
    if state not in _ALERT_OF_STATE:
        return ()
    name, usual_reason = _ALERT_OF_STATE[state]
    return (_build_alert(name, run_id, reason or usual_reason, step),)


def alerts_for_absence(
    name: str, parts: Sequence[str], *, run_id: str, step: int, what: str
) -> tuple[Alert, ...]:
    """Return one alert for each lost part, and one for all beyond the first few.

    Args:
        name: one of ``ABSENCE_ALERTS``.
        parts: displayed names, such as ``node-b`` or ``rank 3``.
        run_id: the run.
        step: the run's last step.
        what: the problem of each of them.
    """
    shown, rest = parts[:_MOST_PARTS], parts[_MOST_PARTS:]
    raised = [_build_alert(name, run_id, f"{part}: {what}", step, part) for part in shown]
    if rest:
        raised.append(_build_alert(name, run_id, f"{len(rest)} more: {what}", step, "others"))
    return tuple(raised)


def alert_for_cap(run_id: str, summary: str = "") -> Alert:
    """Return the alert for a run above its storage cap with nothing left to delete."""
    return _build_alert("RunOverCap", run_id, summary, -1)


def point_is_over(
    *, raised_step: int, last_step: int, last_unhealthy_step: int, healthy_steps: int = 100
) -> bool:
    """Return whether an alert about a single step resolves after healthy steps.

    After a rollback steps count again from an earlier one, so the event stays until the run has
    come past the trouble.
    """
    if healthy_steps < 1:
        raise ConfigError(f"healthy_steps is {healthy_steps}; it must be at least 1")
    return last_step >= max(raised_step, last_unhealthy_step) + healthy_steps


def _build_alert(name: str, run_id: str, summary: str, step: int, cause: str = "") -> Alert:
    """Return an alert with the severity of its ``AlertSpec``."""
    spec = ALERTS_BY_NAME[name]
    labels = {"run": run_id} | ({"cause": cause} if cause else {})
    return Alert(
        name=name,
        severity=spec.severity,
        labels=labels,
        summary=summary,
        step=step,
        point=spec.point,
    )
