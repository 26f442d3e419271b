"""Records of a training: steps, findings, decisions, commands, events.

An event is msgpack in the rows of the ``events`` stream; a long one takes several rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from trainvitals.errors import UNREADABLE
from trainvitals.redaction import may_hold_secret, redact_text
from trainvitals.rows import Column, Schema, Value

EVENT_PAYLOAD_BYTES = 936

# ---------------------------------------------------------------------------------- findings


Level = Literal["actionable", "advisory"]
Severity = Literal["page", "notify", "log"]
"""Urgency of an alert: someone must act now (page), is informed (notify), or neither (log)."""
SEVERITY_WORDS: dict[Severity, str] = {"page": "Page", "notify": "Notice", "log": "Info"}
"""Displayed names."""
ActionName = Literal["continue", "skip_step", "rollback", "halt", "accept_level", "restart"]
"""``restart`` is the node's agent's: it ends a job that hangs, and its launcher starts it again."""


BAD_LOSS, BAD_GRADIENTS, LOSS_OUTLIER, NORM_OUTLIER, OVERFLOW, RANK_FAILED = 1, 2, 4, 8, 16, 32
WITHHELD, CLIPS, NONFINITE_STATE, SNAPSHOT_MISSED, COMMANDED = 64, 128, 256, 512, 1024
REPLICAS_DIFFER, SETTINGS_DIFFER, REPLAYED_ALIKE, RATE_DECLARED = 2048, 4096, 8192, 16384
NO_GRADIENT, CHANGE_EXPECTED = 32768, 65536
VERDICT_BITS = {
    BAD_LOSS: "loss non-finite",
    BAD_GRADIENTS: "gradients non-finite",
    LOSS_OUTLIER: "loss outlier",
    NORM_OUTLIER: "norm outlier",
    OVERFLOW: "scaler overflow",
    RANK_FAILED: "a rank could not measure",
    WITHHELD: "outlier withheld",
    CLIPS: "the loop clips",
    NONFINITE_STATE: "optimizer state or buffers non-finite",
    SNAPSHOT_MISSED: "a snapshot was missed",
    COMMANDED: "an operator skipped the update",
    REPLICAS_DIFFER: "replicas differ",
    SETTINGS_DIFFER: "settings differ between ranks",
    REPLAYED_ALIKE: "the replay after a rollback was bitwise equal",
    RATE_DECLARED: "the learning rate rose as declared or scheduled",
    NO_GRADIENT: "all gradients were 0 or missing",
    CHANGE_EXPECTED: "a change was announced, or the loop changed the parameter groups",
}
"""Bits of the column ``steps.verdict``. The first two, OVERFLOW and WITHHELD skip the update; a
finite outlier alone does not."""
HUGE_WEIGHT = 1e9
"""Absolute value that no useful weight has; a flipped exponent bit reaches 1e29 and more."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Reduced numbers of one step: equal on all ranks, and the only input of detectors."""

    step: int
    attempt: int
    loss: float | None = None
    loss_max: float | None = None
    loss_max_rank: int = -1
    grad_norm: float | None = None
    loss_limit: float | None = None
    grad_norm_limit: float | None = None
    nonfinite_ranks: tuple[int, ...] = ()
    failed_ranks: tuple[int, ...] = ()
    nonfinite_params: int = 0
    nonfinite_state: int = 0
    """Ranks whose parameters, optimizer state or buffers contain an unexpected NaN or Inf. Checked
    with each snapshot, and without snapshots every 200 steps."""
    nonfinite_state_rank: int = -1
    """The rank, if there is only one."""
    snapshots_missed: int = 0
    """Ranks that failed to take a due snapshot."""
    replicas_differ: int = 0
    """Ranks whose parameters, optimizer state or averages may be wrong, because replicas differ."""
    replica_rank: int = -1
    """The rank that is wrong, if it is known; for settings too."""
    settings_differ: bool = False
    """Whether ranks that train one model have different settings, such as the learning rate."""
    replayed_alike: bool = False
    """Whether the same difference appeared again after a rollback, bit for bit."""
    skipped: bool = False
    commanded: bool = False
    """Whether an operator had the update skipped."""
    withheld: bool = False
    """Whether the rule of finite outliers withheld the update; in ``observe`` it would have."""
    overflow: bool = False
    learning_rate: float | None = None
    """As it was applied: the schedule's times ``lr_factor``."""
    lr_factor: float = 1.0
    """Factor of the escalation policy on the schedule's rate."""
    rate_declared: bool = False
    """Whether the rate rose to the value of the declared schedule, or of a scheduler given to
    ``watch``, at this step."""
    change_expected: bool = False
    """Whether the loop announced a change for this step, or changed the parameter groups."""
    clips: bool = False
    """Whether the loop clips, to no more than a usual gradient norm: the state then counts as
    damaged sooner, because healthy states do not spike as high."""
    no_gradient: bool = False
    """Whether every gradient was exactly 0, or no parameter had one: the update trains nothing."""
    turn: int = 0
    """Optimizer of the update: 0 for all together, k for the k-th alone."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one detector about one step."""

    kind: str
    level: Level
    step: int
    detector: str
    reason: str
    rank: int = -1
    value: float | None = None
    limit: float | None = None
    onset_step: int = -1
    cause: str = ""
    severity: Severity | Literal[""] = ""
    """Severity of a user alert; otherwise the kind determines it."""
    layer: str = ""
    """Layer whose optimizer state was reset."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Action of the escalation policy on findings: one entry of the decision log."""

    ledger_seq: int
    action: ActionName
    step: int
    """The step the decision is about."""
    decided_at_step: int
    """The step in whose ``Monitor.step`` it was decided: ``step`` plus the readback lag."""
    attempt: int
    reason: str
    rule: str
    cause: str
    rank: int = -1
    value: float | None = None
    limit: float | None = None
    mode: str = "guard"
    acted: bool = True
    """False in ``observe`` mode: recorded, not done."""
    skipped: bool = False
    """Whether the update of ``step`` was not applied: also true for a rollback or a halt, which are
    the only entry of their step."""
    checkpoint_id: str = ""
    rollback_to_step: int = -1
    new_attempt: int = 0
    skip_batches: int = 0
    lr_factor: float = 1.0
    budget_left: int = -1
    cost_steps: int = 0
    """Updates lost: 1 for a skip, the steps trained again for a rollback."""
    command_number: int = 0
    evidence: dict[str, float] = {}


def is_skip(decision: Decision) -> bool:
    """Return whether a decision record reports a skipped update; older ones have less evidence."""
    return decision.skipped or (decision.acted and decision.action == "skip_step")


_DONE: dict[ActionName, str] = {
    "skip_step": "update skipped",
    "rollback": "rolled back",
    "halt": "run halted",
    "accept_level": "new level accepted",
    "restart": "hung job ended, to be restarted by its launcher",
}
_NOT_DONE: dict[ActionName, str] = {
    "skip_step": "would have skipped the update",
    "rollback": "would have rolled back",
    "halt": "would have halted the run",
    "accept_level": "would have accepted a new level",
    "restart": "would have ended the hung job",
}


def action_text(decision: Decision) -> str:
    """Return the action in a decision record, done or only proposed, without its reason."""
    text = (_DONE if decision.acted else _NOT_DONE).get(decision.action, "none")
    if decision.action == "rollback" and decision.rollback_to_step >= 0:
        text = f"{text} to step {decision.rollback_to_step}"
    return text if decision.acted else f"{text} ({decision.mode} mode)"


def decision_text(decision: Decision) -> str:
    """Return action and reason of a decision record as one line, without the step."""
    # The target was stated already, and the checkpoint's name is in `vitals show`.
    target = f"; rollback to step {decision.rollback_to_step} ({decision.checkpoint_id})"
    reason = decision.reason.replace(target, "") if decision.acted else decision.reason
    return f"{action_text(decision)}: {reason}"


# ---------------------------------------------------------------------------------- commands


CommandAction = Literal[
    "halt", "rollback", "skip", "lr", "accept", "lr_factor", "checkpoint", "approve",
    "veto", "pause", "resume", "profile", "stacks",
]  # fmt: skip
COMMAND_CODES: dict[str, int] = {
    "halt": 1, "rollback": 2, "skip": 3, "lr": 4, "accept": 5, "lr_factor": 6, "checkpoint": 7,
    "approve": 8, "veto": 9, "pause": 10, "resume": 11, "profile": 12,
    "stacks": 13,
}  # fmt: skip


_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Range of signatures and databases: a larger value is refused when it is decoded."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal to the escalation policy; takes effect at most once.

    On its way through a collector it has the signature of an operator's control key over all of it
    (``io.control_key``); in the mailbox one by the run's own key as well.

    ``number`` is the microsecond of issue: strictly growing, exact in a float64, and comparable
    without memory of earlier commands. ``checkpoint_id`` is a name in the run's own store.
    """

    number: _Int64
    run_id: str
    action: CommandAction
    reason: str
    issued_by: str
    issued_unix_ns: _Int64
    expires_unix_ns: _Int64
    checkpoint_id: str = ""
    argument: float = 0.0
    control_signature: str = ""
    """By the control key; "" if the run's owner put it into the run's own directory."""
    signature: str = ""
    """By the run's key, over all other fields."""


class ProfileArgument(NamedTuple):
    """Duration and rank of a profile: the argument of its command, encoded in one number."""

    num_steps: int
    rank: int = -1
    """-1: the slowest rank and a typical one."""
    by_itself: bool = False
    """Whether the run itself requested it, because it became slower."""

    @property
    def argument(self) -> float:
        """The profile command's argument: exact in a float64 up to 2**44 ranks."""
        return float(self.num_steps | self.by_itself << 7 | self.rank + 1 << 8)

    @classmethod
    def from_argument(cls, argument: float) -> ProfileArgument:
        """Return the duration and rank that the record of a profile command encodes."""
        bits = int(argument)
        return cls(bits & 127, (bits >> 8) - 1, bool(bits & 128))


class CommandAck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a command."""

    number: int
    status: Literal["done", "refused", "expired", "invalid"]
    step: int
    detail: str


# -------------------------------------------------------------------------------- heartbeats


Phase = Literal["data", "forward_backward", "exchange", "checkpoint", "evaluate", "other"]
"""Activity of the training thread. ``data`` is known in a loop over ``monitor.batches``; elsewhere
the wait for a batch counts as ``forward_backward``."""


OnHang = Literal["alert", "restart"]
"""``restart`` also ends a job that hangs, so that its launcher starts it again."""


PipelineState = Literal["", "works", "waits"]
"""In a pipeline: whether a rank without progress waits for other ranks; empty without one."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank's training thread, written by its side thread about twice a second.

    Sequence numbers count the collectives started in each process group. The location, and the last
    collectives, are only looked up if nothing has changed for a while.
    """

    beat: int
    monotonic_ns: int
    step: int = -1
    phase: Phase = "other"
    is_announced: bool = False
    """Whether the loop announced it by ``monitor.phase``, or Vitals itself makes a checkpoint."""
    cpu_seconds: float = -1.0
    """CPU time of the training thread; -1 if the system does not provide it."""
    thread: int = 0
    """The training thread's id."""
    sequences: dict[str, int] = {}
    """By process group, without our own group for checkpoints."""
    where: str = ""
    """``file:line (function)`` of the training thread, in the user's own code."""
    is_debugged: bool = False
    """Whether it is stopped in a Python debugger."""
    pipeline: PipelineState = ""
    stack_signal: int = 0
    """The signal that makes the process write all its stacks next to the journal; 0: none."""
    last_collectives: dict[str, dict[int, str]] = {}
    """By process group, the latest collectives by number, if the flight recorder has them."""
    started: dict[str, int] = {}
    """By process group, the last collective that the device began, if the recorder knows."""
    no_recorder: str = ""
    """Why torch's flight recorder is unavailable."""
    on_hang: OnHang = "alert"
    """Reaction to a hang that pages, chosen by the loop."""


ProcessState = Literal["alive", "disk", "stopped", "traced", "gone", "ended"]
"""State of a rank's training thread. ``disk`` is the system's uninterruptible sleep (D), ``traced``
a native debugger's stop, ``gone`` an unexpected end, ``ended`` a regular one."""


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """State of one rank, seen by the agent of its node: its heartbeat, and its process."""

    rank: int
    node: str = ""
    step: int = -1
    phase: Phase = "other"
    is_announced: bool = False
    is_debugged: bool = False
    pipeline: PipelineState = ""
    where: str = ""
    sequences: dict[str, int] = {}
    last_collectives: dict[str, dict[int, str]] = {}
    started: dict[str, int] = {}
    process: ProcessState = "alive"
    still_seconds: float = 0.0
    """Since its step or one of its sequence numbers moved."""
    is_active: bool = True
    """Whether it computes: CPU time, bytes or its place in the code have changed recently."""
    is_mute: bool = False
    """Whether its process runs and its heartbeat does not come: C code holds the interpreter."""
    num_steps: int = 0
    """Steps since its start, as far as they were observed."""
    exit: str = ""
    """How its process ended, if known."""


# ------------------------------------------------------------------------------------ events


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes of a run: shown and searched, never keys."""

    name: str = ""
    project: str = ""
    user: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, str | int | float | bool | None] = {}
    git_commit: str = ""
    mode: str = "guard"
    world_size: int = 1
    readback_lag: int = 1
    num_params: int = 0
    torch_version: str = ""
    vitals_version: str = ""
    run_dir: str = ""
    judge: dict[str, Any] = {}
    """Settings of the detectors and the policy, so that a replay uses the same ones."""
    total_steps: int = 0
    """Declared optimizer steps of the whole run; 0: not declared."""
    schedule: str = ""
    """Schedule that its learning rates are compared with, for display."""
    task: str = ""
    """Kind of a post-training run, whose scalars are judged; empty: any other run."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: step, attempt and times are columns of the event's row, not of its body."""


class RunStarted(_Event, frozen=True, kw_only=True):
    """Identity of the run: once in each incarnation of global rank 0."""

    info: RunInfo


class RankStarted(_Event, frozen=True, kw_only=True):
    """Identity of the rank: once in every rank's incarnation."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    node: str
    gpu_uuid: str = ""
    process_started_unix_ns: int = 0
    """When the process started, if this is the first run it watches; 0: not known."""


class AttemptStarted(_Event, frozen=True, kw_only=True):
    """A new attempt starts."""

    id: int
    parent: int | None
    fork_step: int
    reason: str


class NamesDefined(_Event, frozen=True, kw_only=True):
    """Names of the ids in the ``scalars`` or ``layers`` stream."""

    stream: str
    names: dict[int, str]


class FindingRaised(_Event, frozen=True, kw_only=True):
    """A detector in the training loop spoke."""

    finding: Finding


class DecisionMade(_Event, frozen=True, kw_only=True):
    """The policy decided: an entry of the decision log."""

    decision: Decision


class StateRead(_Event, frozen=True, kw_only=True):
    """Result of the probe or an evaluation: the current state, tested on earlier batches."""

    trigger: Literal["spike", "nonfinite", "level", "evaluation", "row", "lr_jump"]
    """Why the test ran: a reported spike or burst, consecutive non-finite losses, a rise of the
    loss's level; or the loop's own evaluation. Older versions also ran it after consecutive finite
    outliers and after a jump of the learning rate."""
    onset_step: int
    """First step of the problem that triggered it."""
    num_batches: int
    """Number of tested batches; fewer than three are not enough."""
    ratio: float | None
    """Median loss now over median loss then, both with a small floor; infinite if a loss or a
    gradient is non-finite; None: it abstained."""
    then: float | None = None
    now: float | None = None
    verdict: Literal["state", "worse", "sound", "abstained"] = "abstained"
    """Whether the state is the cause; ``worse`` if it may be, without enough evidence for a
    rollback."""
    detail: str = ""


class CommandAcknowledged(_Event, frozen=True, kw_only=True):
    """A command was applied, refused, or came too late."""

    ack: CommandAck


class TrainingPaused(_Event, frozen=True, kw_only=True):
    """All ranks wait between two steps because of a command, or no longer do."""

    is_paused: bool
    reason: str = ""


class CheckpointChanged(_Event, frozen=True, kw_only=True):
    """A checkpoint or snapshot changed state."""

    checkpoint_id: str
    checkpoint_step: int
    state: Literal["candidate", "verified", "healthy", "retired", "bad"]
    where: Literal["memory", "disk"]
    num_bytes: int = 0
    detail: str = ""


class DataWindowSkipped(_Event, frozen=True, kw_only=True):
    """Batches that training moved past, by index in the epoch: first inclusive, last exclusive."""

    epoch: int
    first_batch: int
    last_batch: int
    reason: str


class BatchNoted(_Event, frozen=True, kw_only=True):
    """Batches of a bad step on one rank, from the first one on, and their samples."""

    epoch: int
    first_batch: int
    num_batches: int
    sample_ids: tuple[int | str, ...] = ()
    """Indices in the dataset, or what ``sample_ids`` gave: the first of them, if they are many."""
    num_samples: int = -1
    """Number of all samples; -1 if unknown."""
    file: str = ""
    """File of the stored batches, in the run directory."""


class ChangeExpected(_Event, frozen=True, kw_only=True):
    """The user announced a planned change: finite rules start a new baseline."""

    reason: str
    steps: int


class Note(_Event, frozen=True, kw_only=True):
    """A message of Vitals that is logged once, with a stable code.

    It is a warning if its ``severity`` is warning or error. The notes that users write are
    ``views.AnnotationView``.
    """

    code: str
    text: str
    severity: Literal["info", "warning", "error"] = "info"


class HangLimits(msgspec.Struct, frozen=True, kw_only=True):
    """After how many seconds a wait for a rank is shown, and pages; by the rank's phase."""

    show: dict[Phase, float]
    page: dict[Phase, float]
    computing: float
    """After which a rank that computes pages."""


class RanksStill(_Event, frozen=True, kw_only=True):
    """Activity of a node's stalled ranks, for an observer that sees all nodes."""

    world_size: int
    ranks: tuple[RankActivity, ...]
    """None if they are running again."""
    limits: HangLimits


class StacksTaken(_Event, frozen=True, kw_only=True):
    """Stack of a rank that waited, or that others waited for."""

    rank: int
    stacks: str = ""
    """Stacks of all its threads, the innermost call first; the main thread's at the end."""
    collectives: tuple[str, ...] = ()
    """The last ones it had begun, the oldest first."""
    detail: str = ""
    """Why there are no stacks."""
    command_number: int = 0
    """Number of the command that they respond to; 0 if they were taken in a wait."""


class RunEnded(_Event, frozen=True, kw_only=True):
    """Last event of an incarnation that ended regularly."""

    state: Literal["finished", "halted", "interrupted", "failed"]
    reason: str = ""


Event = (
    RunStarted
    | RankStarted
    | AttemptStarted
    | NamesDefined
    | FindingRaised
    | DecisionMade
    | StateRead
    | CommandAcknowledged
    | TrainingPaused
    | CheckpointChanged
    | DataWindowSkipped
    | BatchNoted
    | ChangeExpected
    | Note
    | RanksStill
    | StacksTaken
    | RunEnded
)

_EVENT_ENCODER = msgspec.msgpack.Encoder()
_EVENT_DECODER: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

EVENT_SCHEMA = Schema(
    "events",
    (
        Column("step", "i8"),
        Column("attempt", "i8"),
        Column("time_unix_ns", "i8"),
        Column("monotonic_ns", "i8"),
        Column("part", "i8"),
        Column("num_parts", "i8"),
        Column("length", "i8"),
        Column("payload", f"S{EVENT_PAYLOAD_BYTES}"),
    ),
)


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event with the columns of its row."""

    seq: int
    step: int
    attempt: int
    time_unix_ns: int
    event: Event | None
    """None if this version does not know the event's type."""


def encode_event(
    event: Event, *, step: int, attempt: int, time_unix_ns: int, monotonic_ns: int
) -> list[list[Value]]:
    """Return the rows of an event record (values as in EVENT_SCHEMA); a long one takes several.

    Likely secrets in its texts are redacted: an exception's message may contain a URL.
    """
    payload = _EVENT_ENCODER.encode(event)
    if may_hold_secret(payload):
        payload = _EVENT_ENCODER.encode(_redact_event(msgspec.msgpack.decode(payload)))
    num = max(1, -(-len(payload) // EVENT_PAYLOAD_BYTES))
    size = EVENT_PAYLOAD_BYTES
    return [
        [
            step,
            attempt,
            time_unix_ns,
            monotonic_ns,
            part,
            num,
            len(payload),
            payload[part * size : part * size + size],
        ]
        for part in range(num)
    ]


def _redact_event(part: Any) -> Any:
    """Redact each text in an event record; a setting's name is its key."""
    if isinstance(part, str):
        return redact_text(part)
    if isinstance(part, list):
        return [_redact_event(each) for each in part]
    if isinstance(part, dict):
        return {key: _redact_event(value) for key, value in part.items()}
    return part


def decode_events(schema: Schema, raw: bytes) -> Iterator[EventRow]:
    """Yield the event records in consecutive rows; an incomplete one is skipped.

    A batch always ends at the end of an event (see ``wire``), so an incomplete one is a torn tail.
    """
    pending = b""
    expected = 0
    for start in range(0, len(raw), schema.row_size):
        row = memoryview(raw)[start : start + schema.row_size]
        seq = schema.seq_of(row)
        fields = schema.unpack(row)
        part, num, length = (
            _read_int_field(fields, name) for name in ("part", "num_parts", "length")
        )
        if part != expected:
            pending, expected = b"", 0
            if part != 0:
                continue
        payload = fields.get("payload")
        rest = max(0, min(length - part * EVENT_PAYLOAD_BYTES, EVENT_PAYLOAD_BYTES))
        pending += (payload if isinstance(payload, bytes) else b"")[:rest].ljust(rest, b"\0")
        expected = part + 1
        if expected < num:
            continue
        yield _event_row(seq or 0, fields, pending)
        pending, expected = b"", 0


def _event_row(seq: int, fields: dict[str, Value], payload: bytes) -> EventRow:
    """Return an event record with the columns of its row; without an event if it is unreadable."""
    try:
        event: Event | None = _EVENT_DECODER.decode(payload)
    except UNREADABLE:
        event = None
    return EventRow(
        seq=seq,
        step=_read_int_field(fields, "step"),
        attempt=_read_int_field(fields, "attempt"),
        time_unix_ns=_read_int_field(fields, "time_unix_ns"),
        event=event,
    )


def _read_int_field(fields: dict[str, Value], name: str) -> int:
    """Return an integer column of an event's row; 0 if a third-party writer omitted it."""
    value = fields.get(name)
    return value if isinstance(value, int) else 0
