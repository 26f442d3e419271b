"""The life of an alert, and what becomes one. Reads no clock, sends nothing.

Severity says who must act: *page* a human, now; *notify* nobody, Vitals acted; *log* nobody, it was
one step. Point events (a decision) fire at once and resolve after the run stayed healthy for some
steps; conditions (a lost run) resolve when the condition ends.
"""

import enum
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

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


class AlertStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An alert's state, and since when its condition holds."""

    state: AlertState = AlertState.INACTIVE
    active_since: float | None = None


def advance(status: AlertStatus, *, breached: bool, now: float, hold_seconds: float) -> AlertStatus:
    """Return an alert's next status: the rule that it fires once its condition has held.

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
    """Return 16 hexadecimal characters that identify an alert by its rule's name and labels."""
    text = json.dumps([name, sorted(labels.items())], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


NO_ACTION = "took no action; training continues."
HEALTHY_AGAIN = "100 healthy steps have passed without it, or the run has finished."


class AlertSpec(msgspec.Struct, frozen=True, kw_only=True):
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


ALERTS: tuple[AlertSpec, ...] = (
    AlertSpec(
        name="TrainingHalted",
        severity="page",
        point=False,
        did="halted the run.",
        help="The run no longer made healthy progress, or an operator halted it.",
        to_do="Read `vitals postmortem RUN`, fix the cause, then run `vitals resume RUN` and "
        "start the "
        "job again.",
        ends="the run is resumed.",
    ),
    AlertSpec(
        name="RunLost",
        severity="page",
        point=False,
        did="cannot act on a job that does not report.",
        help="A running job stopped reporting without a clean exit.",
        to_do="Check its nodes and its log, then restart the job. If it ended while no collector "
        "was running, `vitals agent --dir DIR` on its node sends the remaining rows.",
        ends="the run reports again.",
    ),
    AlertSpec(
        name="NodeLost",
        severity="page",
        point=False,
        did="cannot act on a node that does not report.",
        help="A node of a running job does not report, neither its agent nor its ranks. The other "
        "ranks cannot finish a step without it.",
        to_do="Check the node, then restart the job.",
        ends="the node reports again, the job is restarted, or the run has ended.",
    ),
    AlertSpec(
        name="RankLost",
        severity="page",
        point=False,
        did="cannot act on a process that has ended.",
        help="A rank's process ended without a clean exit while the job continues; the others "
        "wait for it.",
        to_do="Check the rank's log and its node, then restart the job.",
        ends="the rank reports again, the job is restarted, or the run has ended.",
    ),
    AlertSpec(
        name="AgentLost",
        severity="notify",
        point=False,
        help="A node does not report while the run continues with its ranks: training is fine, but "
        "its agent or its network is not. The journal keeps rows up to its size limit.",
        to_do="Restart the agent, or fix the node's network.",
        ends="the node reports again, the job is restarted, or the run has ended.",
    ),
    AlertSpec(
        name="StreamStopped",
        severity="page",
        point=True,
        did="stopped sending that stream; its rows stay in the node's spool.",
        help="Rows of one stream are not stored: the collector refuses them, the agent serves "
        "another node than the ranks', or another writer used that stream, by mistake or with a "
        "stolen token. Curves and detectors lack these rows.",
        to_do="Read its message. V241: restore `writer.key` in the agent's directory, or restart "
        "the job, because each start has new streams. If another writer used the stream, replace "
        "the ingest token (`vitals token create`), and restart the job.",
    ),
    AlertSpec(
        name="ReceiverFailing",
        severity="page",
        point=False,
        did="keeps trying, and alerts all other receivers.",
        help="An alert has waited for a receiver for 5 minutes, or the receiver refused 10 "
        "deliveries in a row.",
        to_do="Check its URL and its token; `vitals alerts test` shows its response.",
        ends="the receiver accepted all pending alerts, or is no longer configured.",
    ),
    AlertSpec(
        name="RollbackBudgetLow",
        severity="page",
        point=True,
        did="rolled back; the budget allows no further rollback.",
        help="The rollback budget is used up: the next incident halts the run.",
        to_do="Find the cause before the next incident: `vitals postmortem RUN`.",
    ),
    AlertSpec(
        name="StateDamaged",
        severity="page",
        point=True,
        did="did not roll back; training continues with the damaged weights.",
        help="The loss on earlier batches is far higher than it was, so the weights are damaged, "
        "and Vitals did not roll back (mode `guard`, or no checkpoint).",
        to_do="Restart from a checkpoint before the onset (`vitals checkpoints list RUN`); if the "
        "run is healthy, `vitals command RUN accept STEP`.",
    ),
    AlertSpec(
        name="Unguarded",
        severity="page",
        point=True,
        did="applied these updates unchecked; training continues.",
        help="10 or more steps could not be measured, so the guard is not in force: a NaN would "
        "reach the weights.",
        to_do="Read the error in the event `unguarded` or in the training's log, and fix its cause "
        "or report it; `vitals why RUN STEP` shows a step.",
    ),
    AlertSpec(
        name="ZeroGradient",
        severity="notify",
        point=True,
        help="All gradients were exactly 0 for 5 steps in a row (50 if the loss was 0 as well, or "
        "is not minimized), so the run trains nothing.",
        to_do="Look for frozen parameters, a detached loss, dead activations, or half-precision "
        "gradients too small without a `GradScaler`.",
    ),
    AlertSpec(
        name="NonFiniteState",
        severity="page",
        point=True,
        did="did not roll back; training continues.",
        help="Optimizer state, buffers or unused parameters are NaN or infinite while the loss is "
        "finite, and Vitals did not roll back (mode `guard`, or a rollback did not fix it). In "
        "mode `heal` no snapshot or checkpoint is made while a trained tensor is non-finite. The "
        "event "
        "`nonfinite_state` names the tensors.",
        to_do="Restart from a checkpoint. If the model itself sets a buffer to Inf, ignore it: "
        "snapshots continue.",
    ),
    AlertSpec(
        name="ReplicaCorrupted",
        severity="page",
        point=True,
        did="did not roll back; training continues, and no snapshot or checkpoint is made.",
        help="Parameters, optimizer state or averages that must be equal on several ranks are not, "
        "and Vitals did not roll back (mode `guard` or `observe`, no budget left, or the same "
        "difference recurred bit for bit). The finding names the rank, node, GPU and tensor.",
        to_do="Restart from an earlier checkpoint, without the named node. `vitals why RUN STEP` "
        "shows the elements, and `vitals doctor --burn-in 60` tests that node. If the loop writes "
        "parameters on one rank only, fix the loop.",
    ),
    AlertSpec(
        name="ReductionWrong",
        severity="page",
        point=True,
        help="The averaged gradients of a rank, or of all, are not the sum of what the ranks put "
        "in (`SignalSettings(reduction=True)`): a link, a network card or the reduction is faulty.",
        to_do="Check the error counters of the named rank's link, and test its node with `vitals "
        "doctor --burn-in 60`. If the loss has changed, restart from an earlier checkpoint.",
    ),
    AlertSpec(
        name="SettingsDiffer",
        severity="page",
        point=True,
        help="Ranks that train one model have different settings: a learning rate, a weight "
        "decay, a "
        "`max_norm` or a sampler's seed. Their parameters drift apart, or samples repeat.",
        to_do="`vitals why RUN STEP` names the rank and the setting. Make it equal on all ranks "
        "and "
        "restart from an earlier checkpoint.",
    ),
    AlertSpec(
        name="NonFiniteStreak",
        severity="page",
        point=True,
        did="skips every update.",
        help="32 losses in a row were NaN or infinite while the weights are healthy: the run makes "
        "no progress.",
        to_do="Check the data, and the loss function for a division or a logarithm of zero.",
    ),
    AlertSpec(
        name="ProgressLost",
        severity="page",
        point=True,
        help="For 100 steps the loss has been above 90% of its earlier improvement.",
        to_do="Restart from an older checkpoint; if this is intended, `vitals command RUN accept "
        "STEP`.",
    ),
    AlertSpec(
        name="LearningRateHeld",
        severity="page",
        point=True,
        did="rolled back, and holds the earlier learning rate.",
        help="A learning-rate jump damaged the model. The earlier rate holds until the schedule "
        "asks for less than 3 times that.",
        to_do="Fix the schedule, or announce the jump with `monitor.expect(...)`.",
    ),
    AlertSpec(
        name="TrainingRolledBack",
        severity="notify",
        point=True,
        did="rolled back to a healthy state; training continues.",
        help="The training state was damaged.",
        to_do="No action needed; `vitals postmortem RUN` has the cause.",
    ),
    AlertSpec(
        name="LevelShiftAccepted",
        severity="notify",
        point=True,
        did="accepted the new level as normal.",
        help="An operator accepted a level of the loss or of the gradient norm.",
        to_do="No action needed.",
    ),
    AlertSpec(
        name="SnapshotMissed",
        severity="notify",
        point=True,
        help="A snapshot in memory could not be taken, so a rollback would go further back.",
        to_do="The event `snapshot_missed` has the reason, usually too little memory: free it.",
    ),
    AlertSpec(
        name="ApprovalNeeded",
        severity="page",
        point=True,
        did="waits for approval before it rolls back; after `ask_steps` it applies `ask_default`.",
        help="A rollback needs approval, because the setting `[ladder] ask` lists it.",
        to_do="Run `vitals command RUN approve` or `vitals command RUN veto`, or use the "
        "Decisions page.",
    ),
    AlertSpec(
        name="TroubleObserved",
        severity="notify",
        point=True,
        help="Vitals would have rolled back or halted, but its mode is `observe`.",
        to_do="Read `vitals why RUN STEP`; to let Vitals act, restart the run in mode `heal`.",
    ),
    AlertSpec(
        name="RunFailed",
        severity="notify",
        point=False,
        did="recorded how the job ended.",
        help="The training program ended with an error.",
        to_do="Read its traceback, then restart it.",
        ends="the run is resumed.",
    ),
    AlertSpec(
        name="RunOverCap",
        severity="notify",
        point=False,
        did="rolled up all rows that its settings allow.",
        help="A run exceeds its disk cap, and none of the remaining rows may be rolled up.",
        to_do="Raise the cap (`vitals collector --cap-gb`), or delete an ended run (`vitals store "
        "delete`).",
        ends="the run is below its cap.",
    ),
    AlertSpec(
        name="StepSkipped",
        severity="log",
        point=True,
        did="skipped the update.",
        help="One update would have harmed the model.",
        to_do="No action needed.",
    ),
    AlertSpec(
        name="LossDiverged",
        severity="notify",
        point=True,
        help="The loss rose and stays above its lowest level.",
        to_do="Check the learning rate and the data; if it is intended, `vitals command RUN "
        "accept STEP`.",
    ),
    AlertSpec(
        name="LossPlateau",
        severity="notify",
        point=True,
        help="The loss never fell, is stuck since a restart, or rose and did not recover.",
        to_do="Check learning rate and data, or restart from an older checkpoint.",
    ),
    AlertSpec(
        name="LossCollapsed",
        severity="notify",
        point=True,
        help="The loss fell to zero, far below its usual values, or at each of many steps. A fall "
        "from below a tenth of the first losses is only logged.",
        to_do="Check for label leakage, empty or repeated batches, or a masked loss.",
    ),
    AlertSpec(
        name="GradientExplosion",
        severity="notify",
        point=True,
        help="The gradient norm rose over several steps, to 8 times its median or more; a loss "
        "spike often follows. A smaller rise is only logged. A page (cause `huge_gradients`): 12 "
        "norms in a row were above 10 times the root mean square of earlier norms, and the loop "
        "does not clip. With Adam the second moments grew too, and updates stay too small for "
        "about 1,000 steps.",
        to_do="Watch the loss; lower the learning rate if it rises. After a page, restart from a "
        "checkpoint before the first of these steps, with `max_norm`.",
    ),
    AlertSpec(
        name="LearningRateAnomaly",
        severity="notify",
        point=True,
        help="The learning rate changed in a way that no usual schedule does.",
        to_do="Check the scheduler and how it is resumed. If it is intended, use "
        "watch(schedule=...).",
    ),
    AlertSpec(
        name="WeightDecayJumped",
        severity="notify",
        point=True,
        help="The weight decay rose in one step, or at a resume, to many times its highest value "
        "so far. The loss may show it only thousands of steps later.",
        to_do="Check what sets `weight_decay` in the optimizer's parameter groups. "
        "`vitals show RUN --metric steps.weight_decay` shows its values. If it is intended, call "
        "`monitor.expect(...)` before the change.",
    ),
    AlertSpec(
        name="WeightNormMoved",
        severity="notify",
        point=True,
        help="The norm of all weights grows or shrinks much faster than it did before, or that of "
        "a layer changed by more than the optimizer's updates explain.",
        to_do="Check the weight decay of every parameter group, and what else writes to the "
        "weights. `vitals show RUN --metric steps.weight_norm` shows when it began, if that signal "
        "is on. If it is intended, call `monitor.expect(...)` before the change.",
    ),
    AlertSpec(
        name="PolicyCollapsed",
        severity="notify",
        point=True,
        help="The policy became nearly deterministic, and its reward did not rise or was lost.",
        to_do="Go back to a checkpoint before the entropy fell. Lower the learning rate or raise "
        "beta; check that the reward has a signal that no fixed text satisfies.",
    ),
    AlertSpec(
        name="CompletionsRepeat",
        severity="notify",
        point=True,
        help="The policy became nearly deterministic, and its completions run into the length "
        "limit, but its reward was not lost.",
        to_do="Read some completions. If full length is best for the task, nothing is wrong. "
        "Otherwise a fixed text satisfies the reward, or the reward prefers length.",
    ),
    AlertSpec(
        name="RewardDead",
        severity="notify",
        point=True,
        help="In nearly all groups the completions have equal rewards, so there is no gradient. "
        "The reward was lost, or no group ever had a gradient.",
        to_do="Read some completions with their rewards. Check the reward's parser; filter prompts "
        "that always or never succeed; raise the temperature or the completions per prompt.",
    ),
    AlertSpec(
        name="PolicyDiverged",
        severity="notify",
        point=True,
        help="The policy moves away from its reference, and the reward does not rise or was lost.",
        to_do="Raise beta or lower the learning rate, and continue from the checkpoint with the "
        "best reward.",
    ),
    AlertSpec(
        name="CompletionsCut",
        severity="notify",
        point=True,
        help="Nearly all completions are cut at the length limit, and the reward does not rise or "
        "was lost.",
        to_do="Read some completions. Check the end-of-sequence token of the chat template and the "
        "length limit; penalize or mask cut completions.",
    ),
    AlertSpec(
        name="RewardHacked",
        severity="notify",
        point=True,
        help="The training reward is at its best while a held-out reward was lost.",
        to_do="Read the completions with the highest rewards, close the gap of the reward, and "
        "continue from the checkpoint with the best held-out reward.",
    ),
    AlertSpec(
        name="RewardJumped",
        severity="notify",
        point=True,
        help="The reward rose within one step, as no update of the policy makes it rise.",
        to_do="Check whether the reward function, its scale or the prompts changed. Announce "
        "intended changes with `monitor.expect`; read the completions with the highest rewards.",
    ),
    AlertSpec(
        name="PolicyUpdateTooLarge",
        severity="notify",
        point=True,
        help="The updates of a batch move the policy too far from the one that sampled it.",
        to_do="Lower the learning rate or the number of updates per batch; use fresher samples.",
    ),
    AlertSpec(
        name="SamplerDiffers",
        severity="notify",
        point=True,
        help="The sampler's log-probabilities differ from the trainer's: the samples are not from "
        "the policy that is trained.",
        to_do="Check that new weights reach the sampler, and that precision, quantization, "
        "temperature and chat template are the same in both.",
    ),
    AlertSpec(
        name="ChosenImprobable",
        severity="notify",
        point=True,
        help="In preference training the chosen completions become improbable, like the rejected "
        "ones.",
        to_do="Lower the learning rate, raise beta, or add an SFT term to the loss.",
    ),
    AlertSpec(
        name="PreferenceLeaked",
        severity="notify",
        point=True,
        help="Nearly all preference pairs are ranked correctly from the start: they differ in "
        "something trivial.",
        to_do="Compare some pairs as tokens: template, length, marks, and whether the model was "
        "trained on them.",
    ),
    AlertSpec(
        name="RewardOverconfident",
        severity="notify",
        point=True,
        help="The margins of preference pairs grow, while an evaluation ranks fewer pairs "
        "correctly or is worse than guessing.",
        to_do="Use the checkpoint with the best evaluation; train for fewer epochs or on more "
        "pairs.",
    ),
    AlertSpec(
        name="RowsMemorized",
        severity="notify",
        point=True,
        help="SFT memorizes its rows: the training loss falls, while the evaluation loss does not.",
        to_do="Use the checkpoint with the best evaluation; train for fewer epochs or on more "
        "rows, and look for rows that contain their answer.",
    ),
    AlertSpec(
        name="NothingToLearn",
        severity="notify",
        point=True,
        help="The training loss of SFT is near 0 from the first step on.",
        to_do="Decode some labels: the model was trained on these rows, or prompts contain the "
        "answers.",
    ),
    AlertSpec(
        name="BaseModelDestroyed",
        severity="notify",
        point=True,
        help="The first updates of SFT raised the loss far above that of the base model.",
        to_do="Start again from the base model with a tenth of the learning rate.",
    ),
    AlertSpec(
        name="LabelsWrong",
        severity="notify",
        point=True,
        help="SFT trains the wrong tokens: padding, prompts, or completions without an end.",
        to_do="Decode the labels of some rows; set those of padding and prompts to -100, and end "
        "each completion with the end-of-sequence token.",
    ),
    AlertSpec(
        name="AdapterNotTrained",
        severity="notify",
        point=True,
        help="No LoRA adapter is in the optimizer, or none has a gradient.",
        to_do="Make the optimizer after the adapter, from parameters with requires_grad.",
    ),
    AlertSpec(
        name="BaseNotFrozen",
        severity="notify",
        point=True,
        help="The optimizer trains the base weights of layers with a LoRA adapter.",
        to_do="Set requires_grad to False for all parameters except the adapters.",
    ),
    AlertSpec(
        name="LossScaleCollapsed",
        severity="notify",
        point=True,
        help="The gradient scaler found no scale without overflow, so updates are skipped.",
        to_do="Train in bf16; otherwise look for an overflow in the model.",
    ),
    AlertSpec(
        name="LossScaleOverflows",
        severity="log",
        point=True,
        help="The gradient scaler overflows too often, so many updates are skipped.",
        to_do="Consider bf16.",
    ),
    AlertSpec(
        name="ThroughputFell",
        severity="notify",
        point=True,
        help="Training is slower than it was (not counting evaluations and checkpoints).",
        to_do="Look for a slow rank, a slow loader or throttled GPUs: `vitals show RUN`.",
    ),
    AlertSpec(
        name="DataBound",
        severity="notify",
        point=True,
        help="Steps wait for batches: the data loader is too slow.",
        to_do="Give the loader more workers, or faster storage.",
    ),
    AlertSpec(
        name="StragglerRank",
        severity="notify",
        point=True,
        help="All ranks wait for one slow rank.",
        to_do="The message names the slow part: data, loop, GPU clocks or link. Fix that one.",
    ),
    AlertSpec(
        name="MemoryCreep",
        severity="notify",
        point=True,
        help="Device memory rises steadily and will run out.",
        to_do="Look for tensors that the loop keeps, such as losses in a list.",
    ),
    AlertSpec(
        name="TrainingStalled",
        severity="page",
        point=False,
        did="took no action; the job still waits.",
        help="No step has finished for far too long, but the job is alive. A collective may hang.",
        to_do="`vitals stacks RUN` shows the stack of each rank; then restart the job.",
        ends="a step finishes, or the run has ended.",
    ),
    AlertSpec(
        name="RankHung",
        severity="page",
        point=True,
        did="took no action; the job still waits.",
        help="All ranks wait for one that is stopped, dead or blocked, or that has been "
        "computing for far longer than the others ever had to wait before.",
        to_do="`vitals why RUN STEP` shows the stacks of its node's ranks; then restart the job. "
        'With `on_hang="restart"` wait for one minute: Vitals ends most hung jobs itself, and '
        "`HungJobEnded` follows.",
    ),
    AlertSpec(
        name="HungJobEnded",
        severity="notify",
        point=True,
        did="ended the job, because `on_hang` is `restart`; its launcher starts it again.",
        help="A job hung, and the page `RankHung` was not resolved for one minute.",
        to_do="Check that it trains again: `vitals tail RUN`. `vitals why RUN STEP` names the "
        "blocking rank and shows its stack; if it recurs, drain that rank's node. After three "
        "such restarts per day, a hang only pages.",
    ),
    AlertSpec(
        name="CheckpointOverdue",
        severity="notify",
        point=False,
        help="No checkpoint was written for twice the usual interval.",
        to_do="Check the disk, and the log of rank 0 for failed saves.",
        ends="a checkpoint is written, or the run has ended.",
    ),
    AlertSpec(
        name="GpuFault",
        severity="notify",
        point=True,
        help="A GPU reported a fatal Xid or an uncorrected memory error.",
        to_do="Drain its node.",
    ),
    AlertSpec(
        name="GpuLost",
        severity="notify",
        point=True,
        help="A GPU stopped responding; it may have fallen off the bus.",
        to_do="Drain its node.",
    ),
    AlertSpec(
        name="GpuThrottled",
        severity="notify",
        point=True,
        help="A GPU is throttled because of heat or power, and the others wait for it.",
        to_do="Check its cooling.",
    ),
    AlertSpec(
        name="GpuErrors",
        severity="log",
        point=True,
        help="A GPU reported an application Xid, or many corrected memory errors.",
        to_do="Drain its node if this recurs.",
    ),
    AlertSpec(
        name="GpuPowerCapped",
        severity="log",
        point=True,
        help="A GPU runs far below its usual clock because of its power limit.",
        to_do="Check its power limit.",
    ),
    AlertSpec(
        name="SpikeSeen",
        severity="log",
        point=True,
        did="decided about the update in the step's decision.",
        help="The loss or gradient norm was far above its usual values.",
        to_do="No action needed; `vitals why RUN STEP` shows whether the update was applied.",
    ),
    AlertSpec(
        name="RankLossApart",
        severity="log",
        point=True,
        help="One rank's loss keeps differing from the others'.",
        to_do="Check its data and its hardware.",
    ),
    AlertSpec(
        name="LayerOutlier",
        severity="log",
        point=True,
        help="One layer's gradients or updates are unusual while the others are not.",
        to_do="If the loss rises, inspect this layer.",
    ),
    AlertSpec(
        name="ActivationsGrew",
        severity="log",
        point=True,
        help="A module's output grew by an order of magnitude or more since warm-up.",
        to_do="Watch the loss; lower the learning rate if it rises.",
    ),
    AlertSpec(
        name="ActivationsCollapsed",
        severity="log",
        point=True,
        help="A module's output fell by an order of magnitude since warm-up, or nearly all of its "
        "features are 0 for the whole batch.",
        to_do="Restart from an earlier checkpoint with a lower learning rate: dead ReLUs get no "
        "gradient and rarely recover.",
    ),
    AlertSpec(
        name="UserAlert",
        severity="notify",
        point=True,
        help="A rule of the settings file or `monitor.alert` in the training loop raised it. Its "
        "cause is the name you gave it, and its severity the level.",
        to_do="Read its message and its value; `vitals why RUN STEP` shows the other findings.",
    ),
)
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
        """Return the identity of an alert record: raised again, it is the same alert."""
        return fingerprint(self.name, self.labels)


def alerts_for_decision(decision: Decision, *, run_id: str) -> tuple[Alert, ...]:
    """Apply the alert rules to a decision; in ``observe`` only the serious ones raise an alert."""
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
    if decision.action == "halt":
        return (_build_alert("TrainingHalted", run_id, reason, step),)
    if decision.action == "restart":
        return (_build_alert("HungJobEnded", run_id, reason, step, decision.cause),)
    if decision.action == "accept_level":
        return (_build_alert("LevelShiftAccepted", run_id, reason, step, decision.cause),)
    if decision.action == "skip_step":
        return (_build_alert("StepSkipped", run_id, reason, step, decision.cause),)
    raised = [_build_alert("TrainingRolledBack", run_id, reason, step, decision.cause)]
    if decision.rule == "lr_jump":
        raised.append(_build_alert("LearningRateHeld", run_id, reason, step))
    if decision.budget_left == 0:
        low = f"Rollback budget used up; the last one: {reason}"
        raised.append(_build_alert("RollbackBudgetLow", run_id, low, step))
    return tuple(raised)


def is_answered(finding: Finding, actions: Collection[str]) -> bool:
    """Return whether the decisions on a finding's step report it, so that no rule raises it.

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
    """Apply the alert rules to a finding: it raises one alert per cause, while it fires.

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
    if state == "lost":
        return (_build_alert("RunLost", run_id, reason or "the run stopped reporting", step),)
    if state == "halted":
        return (_build_alert("TrainingHalted", run_id, reason or "the run halted", step),)
    if state == "failed":
        return (_build_alert("RunFailed", run_id, reason or "the run ended with an error", step),)
    return ()


def alerts_for_absence(
    name: str, parts: Sequence[str], *, run_id: str, step: int, what: str
) -> tuple[Alert, ...]:
    """Return the rule's alert for each lost part, and one for all beyond the first few.

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
    """Return the alert that the rules define for a run above its storage cap."""
    return _build_alert("RunOverCap", run_id, summary, -1)


def point_is_over(
    *, raised_step: int, last_step: int, last_unhealthy_step: int, healthy_steps: int = 100
) -> bool:
    """Return whether the alert rules resolve an alert about one step after healthy steps.

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
