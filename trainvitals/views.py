"""Requests and responses of the query API, defined once.

The collector answers with these as JSON (``msgspec.json``), the client and the dashboard decode
them. JSON has no NaN: in the points of curves and heat maps a missing or non-finite value is
``null``, and ``nonfinite`` says which were NaN or infinite; everywhere else a number that is not
finite travels as a word (``trainvitals.jsonable``). Fields of bytes are base64.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple

import msgspec

from trainvitals.errors import UsageError
from trainvitals.goodput import Bucket
from trainvitals.question import PerRunQuestion, Question, route
from trainvitals.records import (
    BatchNoted,
    Command,
    CommandAction,
    Decision,
    Finding,
    ProfileArgument,
    RunInfo,
    Severity,
)
from trainvitals.redaction import redact_text
from trainvitals.units import humanize, humanize_count, humanize_seconds

RunState = Literal["running", "finished", "halted", "interrupted", "failed", "lost"]
Health = Literal["healthy", "acting", "critical", "unguarded", "unknown"]
TableName = Literal["runs", "steps", "ranks", "decisions", "findings", "alerts", "events"]
Along = Literal["step", "tokens", "time"]
"""``time``: milliseconds since the first point of the run."""
Branch = Literal["lineage", "discarded", "all"]
"""``lineage``: the stitched curve of the current attempt and its ancestors up to their forks;
``discarded``: discarded rows; ``all``: both."""


Int64 = Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 1)]
"""Operators for steps in a database query."""

MAX_POINTS = 20_000
MAX_MAP_COLUMNS = 2_000
MAX_MAP_ROWS = 1_024
Points = Annotated[int, msgspec.Meta(ge=2, le=MAX_POINTS)]
"""At most about this many."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of runs."""

    run_id: str
    name: str
    project: str
    user: str
    tags: tuple[str, ...]
    mode: str
    state: RunState
    health: Health
    world_size: int
    started_unix_ns: int
    last_seen_unix_ns: int
    last_step: int
    loss: float | None
    grad_norm: float | None
    num_skips: int
    num_rollbacks: int
    num_attempts: int
    num_firing_alerts: int
    last_decision: str = ""
    missing: tuple[str, ...] = ()
    """Nodes, agents and ranks that stopped reporting while the run continues."""


@route("GET", "/v1/runs")
class RunsQuestion(Question[tuple[RunSummary, ...]], frozen=True, kw_only=True):
    """All runs, latest first."""


@route("GET", "/v1/configs")
class ConfigsQuestion(
    Question[dict[str, dict[str, str | int | float | bool | None]]], frozen=True, kw_only=True
):
    """The configuration of every run, by its id, for search and groups."""


class FailingNode(msgspec.Struct, frozen=True, kw_only=True):
    """Node with faults in several of its latest preflights."""

    node: str
    num_failed: int
    num_checks: int
    kinds: tuple[str, ...]
    last_unix_ns: int


@route("GET", "/v1/failing_nodes")
class FailingNodesQuestion(Question[tuple[FailingNode, ...]], frozen=True, kw_only=True):
    """Nodes that failed preflights repeatedly, in the folders that the collector reads."""


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """One branch of the lineage; ``ordinal`` counts from 1 for people."""

    id: int
    ordinal: int
    parent: int | None
    fork_step: int
    started_unix_ns: int
    last_step: int
    reason: str


class SourceView(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a source: a rank's process, a GPU or a node as an agent saw it."""

    source: str
    incarnation: str
    node: str
    pid: int
    started_unix_ns: int
    last_seen_unix_ns: int
    num_rows: int
    num_lost_rows: int
    streams: tuple[str, ...]


class ThinnedView(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one stream that were rolled up, because of their age or the size of the run."""

    stream: str
    reason: Literal["age", "size"]
    num_rows: int
    to_step: int
    """The last step that was rolled up; -1 if rows have no step."""
    to_unix_ns: int
    rule: str
    """Description of the remaining rows."""


class RunVolume(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a run in the store, and its rolled-up rows."""

    num_bytes: int
    max_bytes: int
    """The cap; 0: no cap."""
    thinned: tuple[ThinnedView, ...] = ()
    is_pinned: bool = False
    """Whether it is kept regardless of its age."""


class RunDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A run without its curves."""

    summary: RunSummary
    info: RunInfo
    attempts: tuple[AttemptView, ...]
    sources: tuple[SourceView, ...]
    metrics: tuple[str, ...]
    """Series there are: ``stream.column`` (``steps.loss``, ``gpu.power_watts``, ``scalars.X``)."""
    volume: RunVolume | None = None


@route("GET", "/v1/runs/{run_id}")
class RunQuestion(PerRunQuestion[RunDetail], frozen=True, kw_only=True):
    """Everything about one run that is not a curve."""

    volume: bool = True
    """Whether to compute its size in the store, which doubles the work."""


class NonFiniteMark(msgspec.Struct, frozen=True, array_like=True):
    """A NaN or infinite value; downsampling leaves none out, until there are many thousand."""

    step: int
    attempt: int
    kind: Literal["nan", "+inf", "-inf"]


class SeriesReply(msgspec.Struct, frozen=True, kw_only=True):
    """One series, cut into columns each of which keeps its minimum, maximum and first gap.

    A column is a power of two steps wide (nanoseconds where rows have no step), counted from 0.
    Discarded steps follow branch by branch, each with its own columns.
    """

    run_id: str
    metric: str
    source: str
    unit: str
    branch: Branch
    num_total: int
    step: tuple[int, ...]
    time_unix_ns: tuple[int, ...]
    attempt: tuple[int, ...]
    value: tuple[float | None, ...]
    nonfinite: tuple[NonFiniteMark, ...]
    """At most 20,000, evenly spaced; ``num_nonfinite`` is their number."""
    num_nonfinite: int = 0


@route("GET", "/v1/runs/{run_id}/series")
class SeriesQuestion(PerRunQuestion[SeriesReply], frozen=True, kw_only=True):
    """One curve, downsampled so that no extreme and no non-finite value is lost."""

    metric: str
    """``stream.column``, ``scalars.NAME``, ``layers.NAME`` or ``layers.NAME:COLUMN``."""
    source: str = ""
    """Source of the rows; "" is rank 0, or the first GPU or node."""
    branch: Branch = "lineage"
    points: Points = 1_000
    from_step: Int64 | None = None
    to_step: Int64 | None = None
    """Inclusive."""


class SeriesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which series is wanted, and how finely."""

    metric: str
    """``stream.column``, ``scalars.NAME``, ``layers.NAME`` or ``layers.NAME:COLUMN``."""
    source: str = ""
    """Source of the rows; "" is rank 0, or the first GPU or node."""
    branch: Branch = "lineage"
    """GPU, node and process rows have no step: they come by time, on every branch."""
    points: int = 1_000
    """At least this many where there are as many values, and about twice that at most."""
    smoothing: float = 0.0
    """Weight of the previous mean in an exponential mean over every value, below 1; the mean is
    returned instead of the values. 0: no smoothing."""
    mean: bool = False
    """One mean for each part of the curve instead of its extremes: half as many points. Smoothing
    implies it."""
    from_step: Int64 | None = None
    to_step: Int64 | None = None
    """Inclusive."""
    from_time_unix_ns: Int64 | None = None
    to_time_unix_ns: Int64 | None = None
    """Inclusive: the way to a part of what has no step."""


@route("POST", "/v1/runs/{run_id}/series")
class ManySeriesQuestion(PerRunQuestion[tuple[SeriesReply, ...]], frozen=True, kw_only=True):
    """Several curves of one moment, in the order they are asked for."""

    series: tuple[SeriesRequest, ...]


class CurveReply(msgspec.Struct, frozen=True, kw_only=True):
    """One complete series as raw memory: little-endian, eight bytes per number."""

    run_id: str
    metric: str
    source: str
    unit: str
    branch: Branch
    step: bytes
    """``int64``, as are the next two."""
    time_unix_ns: bytes
    attempt: bytes
    value: bytes
    """``float64``; NaN and infinities are themselves."""


@route("GET", "/v1/runs/{run_id}/curve")
class CurveQuestion(PerRunQuestion[CurveReply], frozen=True, kw_only=True):
    """Every point of one curve, for programs."""

    metric: str
    """``stream.column``, ``scalars.NAME``, ``layers.NAME`` or ``layers.NAME:COLUMN``."""
    source: str = ""
    """Source of the rows; "" is rank 0, or the first GPU or node."""
    branch: Branch = "lineage"
    from_step: Int64 | None = None
    to_step: Int64 | None = None
    """Inclusive."""


class DifferenceReply(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of one run to another at every point, downsampled like a series."""

    base: str
    other: str
    metric: str
    along: Along
    num_total: int
    is_interpolated: bool
    """Whether some x is a place of only one of them."""
    x: tuple[int, ...]
    """Steps, or tokens."""
    value: tuple[float | None, ...]
    """None where one of them was not finite."""


@route("GET", "/v1/runs/{run_id}/difference")
class DifferenceQuestion(PerRunQuestion[DifferenceReply], frozen=True, kw_only=True):
    """What another run's curve has more than this one's."""

    other: str
    metric: str
    along: Along = "step"
    points: Points = 1_000


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One source's row of one step; values that were not measured are absent."""

    source: str
    incarnation: str
    attempt: int
    values: dict[str, float | int | None]
    nonfinite: tuple[str, ...]


class FindingView(msgspec.Struct, frozen=True, kw_only=True):
    """A finding and when it was recorded."""

    run_id: str
    time_unix_ns: int
    finding: Finding


@route("GET", "/v1/runs/{run_id}/findings")
class FindingsQuestion(PerRunQuestion[tuple[FindingView, ...]], frozen=True, kw_only=True):
    """What the run's detectors said, by step."""


class DecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and the time it was recorded."""

    run_id: str
    time_unix_ns: int
    decision: Decision
    hindsight: str = ""
    """For a decision that was not applied: ``needed``, ``unneeded`` or ``open``."""


@route("GET", "/v1/runs/{run_id}/decisions")
class DecisionsQuestion(PerRunQuestion[tuple[DecisionView, ...]], frozen=True, kw_only=True):
    """The decision log of a run, in its order."""


class StepData(msgspec.Struct, frozen=True, kw_only=True):
    """Which samples fed a step on one rank."""

    source: str
    attempt: int
    batch: BatchNoted


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one step: every rank's row, what was found, what was decided."""

    run_id: str
    step: int
    rows: tuple[StepRow, ...]
    findings: tuple[FindingView, ...]
    decisions: tuple[DecisionView, ...]
    readings: tuple[EventView, ...] = ()
    """Result of the probe or an evaluation for the incident of this step."""
    moved_first: str | None = None
    """What moved first before the trouble at the step, in a sentence; empty: nothing stood out from
    the run's own quiet steps; None: there was no trouble at it, or nobody could tell."""
    data: tuple[StepData, ...] = ()
    """Samples of a bad step; for other steps only if the run directory stores them."""
    over_ranks: tuple[StepRow, ...] = ()
    """For a rolled-up step: the numbers over all ranks, ``COLUMN:min`` and so on, for each attempt.
    ``num_ranks`` is how many ranks had a row; ``rows`` then holds only those of the worst."""


@route("GET", "/v1/runs/{run_id}/steps/{step}")
class StepQuestion(PerRunQuestion[StepView], frozen=True, kw_only=True):
    """What is known of one step, on every attempt that trained it."""

    step: Int64


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """The latest state of a checkpoint or snapshot."""

    checkpoint_id: str
    step: int
    attempt: int
    state: str
    where: str
    num_bytes: int
    detail: str
    time_unix_ns: int


@route("GET", "/v1/runs/{run_id}/checkpoints")
class CheckpointsQuestion(PerRunQuestion[tuple[CheckpointView, ...]], frozen=True, kw_only=True):
    """The latest state of each checkpoint and snapshot, by step."""


_PROFILED = " [profile_written]"


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """Any other event, as a line for people."""

    time_unix_ns: int
    source: str
    step: int
    attempt: int
    kind: str
    text: str

    @property
    def profile(self) -> str:
        """Return the path of a ``torch.profiler`` trace that the view's event names, or ""."""
        is_one = self.kind == "Note" and self.text.endswith(_PROFILED)
        return self.text.removesuffix(_PROFILED) if is_one else ""


@route("GET", "/v1/runs/{run_id}/events")
class EventsQuestion(PerRunQuestion[tuple[EventView, ...]], frozen=True, kw_only=True):
    """Other events, all or of one kind, as lines for people, by time."""

    kind: str = ""


class StacksView(msgspec.Struct, frozen=True, kw_only=True):
    """Position of one rank during a wait."""

    time_unix_ns: int
    step: int
    attempt: int
    rank: int
    stacks: str
    """Stacks of all its threads, innermost call first."""
    collectives: tuple[str, ...]
    """The last collectives that it started, oldest first."""
    detail: str
    """Why there are no stacks."""
    command_number: int = 0
    """Number of the command that requested them; 0 for a wait."""

    @property
    def calls(self) -> tuple[str, ...]:
        """Return the calls of the rank's main thread in the API's view, the innermost first.

        The last thread is the main one; the others wait for work.
        """
        main = self.stacks.rstrip().rpartition("(most recent call first):\n")[2]
        return tuple(main.splitlines())


@route("GET", "/v1/runs/{run_id}/stacks")
class StacksQuestion(PerRunQuestion[tuple[StacksView, ...]], frozen=True, kw_only=True):
    """Latest stacks of ranks, taken during a wait or on request, by time."""


class AlertView(msgspec.Struct, frozen=True, kw_only=True):
    """One alert of the inbox."""

    fingerprint: str
    name: str
    run_id: str
    severity: Severity
    state: Literal["pending", "firing", "resolved"]
    summary: str
    labels: dict[str, str]
    step: int
    started_unix_ns: int
    updated_unix_ns: int
    ended_unix_ns: int | None = None
    acknowledged_by: str = ""
    silenced_until_unix_ns: int = 0
    silence_reason: str = ""

    @property
    def title(self) -> str:
        """Return the displayed name of the alert in the API's view; a custom one has its own."""
        return self.labels.get("cause", self.name) if self.name == "UserAlert" else self.name


@route("GET", "/v1/alerts", tag="alerts")
class AlertsQuestion(Question[tuple[AlertView, ...]], frozen=True, kw_only=True):
    """The inbox, newest first: all of it, one run's, or one state's."""

    run_id: str = msgspec.field(default="", name="run")
    state: Literal["", "pending", "firing", "resolved"] = ""


CommandStatus = Literal["pending", "delivered", "done", "refused", "expired", "invalid"]
"""What can become of a command."""


_MAX_AHEAD_US = 3_600 * 1_000_000
MAX_TTL_SECONDS = 3_600.0
MAX_REASON = 500
MAX_RANKS = 2**20
OFFERED: tuple[CommandAction, ...] = (
    "halt", "rollback", "accept", "skip", "lr", "lr_factor", "checkpoint", "approve", "veto",
    "pause", "resume", "profile", "stacks",
)  # fmt: skip


class CommandArgument(NamedTuple):
    """The number that an action takes. It travels between ranks as a float64."""

    name: str
    least: float
    most: float
    is_whole: bool
    hint: str
    is_optional: bool = False

    def check(self, action: str, argument: float | None) -> None:
        """Check the argument in a request to the API: raise UsageError if it does not fit."""
        if argument is None and self.is_optional:
            return
        if argument is None:
            raise UsageError(f"{action} needs a {self.name}", hint=self.hint)
        if self.is_whole and not (argument >= 0 and argument % 1 == 0):
            text = f"{action} is given {self.name} {argument:g}; it must be a whole number"
            raise UsageError(text, hint=self.hint)
        if not self.least <= argument <= self.most:
            text = f"{action} is given {self.name} {argument:g}; it must be {self.least:g} to"
            raise UsageError(f"{text} {self.most:g}", hint=self.hint)


COMMAND_ARGUMENTS: dict[str, CommandArgument] = {
    "accept": CommandArgument(
        "step", 0, 2**53, True, "say which step was healthy: vitals command RUN accept STEP"
    ),
    "skip": CommandArgument(
        "number of steps", 1, 1000, True, "say how many updates: vitals command RUN skip 20"
    ),
    "profile": CommandArgument(
        "number of steps", 1, 100, True, "vitals command RUN profile --steps 10"
    ),
    "lr": CommandArgument(
        "learning rate", 1e-12, 1e3, False, "vitals command RUN lr 1e-4, or a factor: lr x0.5"
    ),
    **{
        action: CommandArgument(
            "decision's number", 0, 2**53, True, f"vitals command RUN {action} [NUMBER]", True
        )
        for action in ("approve", "veto")
    },
    "lr_factor": CommandArgument(
        "factor", 1e-6, 100, False, "vitals command RUN lr x0.5; x1 is the schedule's own rate"
    ),
}


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A manual command for the escalation policy."""

    action: CommandAction
    reason: str
    checkpoint_id: str = ""
    argument: float | None = None
    """What ``COMMAND_ARGUMENTS`` says of the action, where it takes one."""
    ttl_seconds: float = 60.0
    rank: int = -1
    """Rank for a profile; -1: the slowest rank and a typical one."""

    def check(self) -> None:
        """Check a request to the API: raise UsageError for a command that no run can carry out.

        Raises:
            UsageError: it names the field, the value and what is expected.
        """
        if self.action not in OFFERED:
            raise UsageError(
                f"action is {self.action!r}; this version does not yet offer it",
                hint=f"offered are {', '.join(OFFERED[:-1])} and {OFFERED[-1]}",
            )
        if not 0 < len(self.reason.strip()) <= MAX_REASON or not self.reason.isprintable():
            raise UsageError(
                f"reason has {len(self.reason)} characters; give 1 to {MAX_REASON} printable ones",
                hint="say why, with --reason on the command line; it is recorded in the run",
            )
        if not (math.isfinite(self.ttl_seconds) and 0 < self.ttl_seconds <= MAX_TTL_SECONDS):
            raise UsageError(
                f"ttl_seconds is {self.ttl_seconds}; it must be above 0 and at most "
                f"{MAX_TTL_SECONDS:g}"
            )
        if self.rank != -1 and not (self.action == "profile" and 0 <= self.rank < MAX_RANKS):
            raise UsageError(
                f"rank is {self.rank} for {self.action}; only profile takes one, from 0 on"
            )
        if self.checkpoint_id and self.action != "rollback":
            raise UsageError(f"checkpoint_id was given; {self.action} takes none")
        rule = COMMAND_ARGUMENTS.get(self.action)
        if rule is not None:
            rule.check(self.action, self.argument)
        elif self.argument not in (None, 0.0):
            raise UsageError(f"argument is {self.argument:g}; {self.action} takes none")

    def command(self, run_id: str, *, issued_by: str, now_unix_ns: int, after: int = 0) -> Command:
        """Return the API's request as a command record that is not signed yet.

        Args:
            run_id: the run.
            issued_by: who asks.
            now_unix_ns: the time of issue.
            after: the newest number of the run so far.

        Raises:
            UsageError: no run accepts this, or the number comes from a clock that is far ahead of
                this one.
        """
        self.check()
        now = now_unix_ns // 1_000
        if after - now > _MAX_AHEAD_US:
            raise UsageError(
                f"the run's newest command has a number {(after - now) / 6e7:.0f} minutes ahead of"
                " this machine's clock",
                hint="set the clock of this machine, or of the one it was issued on",
            )
        return Command(
            number=max(now, after + 1),
            run_id=run_id,
            action=self.action,
            reason=redact_text(self.reason),
            issued_by=issued_by,
            issued_unix_ns=now_unix_ns,
            expires_unix_ns=now_unix_ns + int(self.ttl_seconds * 1e9),
            checkpoint_id=self.checkpoint_id,
            argument=self._numeric_argument(),
        )

    def _numeric_argument(self) -> float:
        """Return the request's argument as the number in a command record."""
        if self.action == "profile" and self.argument:
            return ProfileArgument(int(self.argument), self.rank).argument
        return float(self.argument or 0.0)

    @classmethod
    def from_command(cls, command: Command) -> CommandRequest:
        """Return a request to the API with the fields of a command, to check their bounds."""
        takes_argument = command.argument or command.action == "accept"
        argument, rank = command.argument if takes_argument else None, -1
        if command.action == "profile" and argument is not None:
            profiled = ProfileArgument.from_argument(argument)
            argument, rank = float(profiled.num_steps), profiled.rank
        return cls(
            action=command.action,
            reason=command.reason,
            checkpoint_id=command.checkpoint_id,
            argument=argument,
            rank=rank,
            ttl_seconds=(command.expires_unix_ns - command.issued_unix_ns) / 1e9,
        )

    @property
    def text(self) -> str:
        """Return the command in a request to the API in a few words, such as ``lr x0.5``."""
        if self.action == "lr_factor":
            return f"lr x{self.argument:g}"
        text = f"{self.action} {self.argument:.12g}" if self.argument else self.action
        return f"{text} of rank {self.rank}" if self.rank >= 0 else text


class DeliveredRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report that a command is in the mailbox, by the agent on rank 0's node."""

    incarnation: str


class CommandView(msgspec.Struct, frozen=True, kw_only=True):
    """A command and what became of it."""

    command: Command
    status: CommandStatus
    detail: str = ""
    step: int = -1


@route("GET", "/v1/runs/{run_id}/commands", tag="commands", scopes=("read", "ingest"))
class CommandsQuestion(PerRunQuestion[tuple[CommandView, ...]], frozen=True, kw_only=True):
    """The run's commands, newest first; ``pending`` is what an agent has to deliver."""

    status: Literal["", CommandStatus] = ""


class CellsReply(msgspec.Struct, frozen=True, kw_only=True):
    """A heat map: one metric of every rank, GPU, node or layer, over steps."""

    run_id: str
    metric: str
    unit: str
    rows: tuple[str, ...]
    """Sources (``rank:3``) or names of layers: the most deviating where there are more."""
    num_rows: int
    """How many there are."""
    step: tuple[int, ...]
    """The first step of each column."""
    value: tuple[tuple[float | None, ...], ...]
    """``value[row][column]``: of the steps of a column the value furthest from the row's middle."""
    nonfinite: tuple[tuple[int, int], ...]
    """(row, column) of the cells with a NaN or infinite value in them."""
    rolled_back: tuple[int, int] | None = None
    """The first and the last step of which a value is in it that was rolled back."""
    nonfinite_rolled_back: tuple[tuple[int, int], ...] = ()
    """Those of ``nonfinite`` in which no step that was kept has such a value."""


@route("GET", "/v1/runs/{run_id}/cells", tag="look back")
class CellsQuestion(PerRunQuestion[CellsReply], frozen=True, kw_only=True):
    """A heat map of one metric: ranks, GPUs, nodes or layers by steps."""

    metric: str
    """``steps.COLUMN``, ``gpu.COLUMN``, ``node.COLUMN`` or ``layers.COLUMN``."""
    points: Annotated[int, msgspec.Meta(ge=1, le=MAX_MAP_COLUMNS)] = 200
    """Maximum number of columns."""
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_MAP_ROWS)] = 64
    """Maximum number of rows; the most unusual ones are returned."""
    branch: Branch = "all"
    """With ``all``, a cell covers the values of all attempts."""
    from_step: Int64 | None = None
    to_step: Int64 | None = None
    """Inclusive."""


class MoverView(msgspec.Struct, frozen=True, kw_only=True):
    """A layer or rank whose numbers moved before a step, the one that moved most first."""

    row: str
    metric: str
    before: float | None
    """The median of the steps before the window."""
    peak: float | None
    """The value furthest from it in the window; None where it is not finite."""
    peak_step: int
    score: float
    """Distance of the peak from the median, in robust standard deviations."""


@route("GET", "/v1/runs/{run_id}/movers", tag="look back")
class MoversQuestion(PerRunQuestion[tuple[MoverView, ...]], frozen=True, kw_only=True):
    """The layers and ranks that moved most up to a step, the first of them first."""

    step: Int64


class AttemptGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """Where the wall time of one attempt went."""

    id: int
    nanoseconds: dict[Bucket, int]


class GoodputView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's wall time went; what was not measured is None."""

    run_id: str
    name: str
    state: RunState
    begin_unix_ns: int = 0
    end_unix_ns: int = 0
    nanoseconds: dict[Bucket, int] = {}
    """By bucket; they add up to the time from begin to end."""
    undone: dict[Bucket, int] = {}
    """Earlier buckets of steps that were rolled back."""
    attempts: tuple[AttemptGoodput, ...] = ()
    ratio: float | None = None
    """The productive share, 0 to 1."""
    steps: int = 0
    lost_steps: int = 0
    """Steps that were skipped or undone."""
    num_failures: int = 0
    """Stops that nobody planned: processes that failed or were lost, halts, hangs."""
    mttf_seconds: float | None = None
    """Mean time to failure."""
    mttr_seconds: float | None = None
    """Mean time to recovery: from the last progress to the next step."""
    gpu_hours: float | None = None
    """Time of all GPUs while a process of the run held them, in hours."""
    money: float | None = None
    """``gpu_hours`` at the price of a GPU-hour, if one is set."""
    energy_joules: float | None = None
    """Energy of the GPUs that reported it."""
    notes: tuple[str, ...] = ()
    """What is unknown, one sentence each."""

    def cost(self) -> list[tuple[str, str]]:
        """Return cost and failures in the API's view of goodput as display text."""
        facts = [("steps", f"{self.steps:,}, {self.lost_steps:,} of them lost")]
        if self.run_id:  # a log of another tool has no failures
            facts.append(("failures", f"{self.num_failures:,}"))
        if self.mttf_seconds is not None:
            facts.append(("mean time to failure", humanize_seconds(self.mttf_seconds)))
        if self.mttr_seconds is not None:
            facts.append(("mean time to recovery", humanize_seconds(self.mttr_seconds)))
        if self.gpu_hours is not None:
            facts.append(("GPU-hours", f"{self.gpu_hours:,.3g}"))
        if self.money is not None and self.gpu_hours:
            price = self.money / self.gpu_hours
            facts.append(("price", f"{self.money:,.2f} at {price:g} a GPU-hour"))
        if self.energy_joules is not None:
            facts.append(("energy of the GPUs", f"{self.energy_joules / 3.6e6:,.3g} kWh"))
        return facts


@route("GET", "/v1/runs/{run_id}/goodput", tag="look back")
class GoodputQuestion(PerRunQuestion[GoodputView], frozen=True, kw_only=True):
    """Where a run's time went: productive, waiting, lost, down; with GPU-hours and price."""


class ForecastView(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of the end and the final loss of a run, or the reason for none."""

    run_id: str
    name: str
    state: RunState
    asked_unix_ns: int
    last_step: int
    """The newest; -1 before the first."""
    total_steps: int = 0
    """That are planned; 0: nobody said."""
    finish_unix_ns: int = 0
    """When the last step ends; 0: ``no_finish`` says why that is not known."""
    finish_low_unix_ns: int = 0
    finish_high_unix_ns: int = 0
    """Between these two it ends four times in five."""
    seconds_per_step: float | None = None
    """Wall time, including restarts, evaluations and saves."""
    step_ratio: float | None = None
    """Share of the wall time between first and last step that was spent in steps."""
    is_waiting: bool = False
    """Whether the run is stalled."""
    no_finish: str = ""
    final_loss: float | None = None
    """The median of the last twentieth of the steps; None: ``no_final_loss`` says why."""
    final_loss_low: float | None = None
    final_loss_high: float | None = None
    no_final_loss: str = ""
    against: str = ""
    """The run it is compared with: its name, or its id."""
    along: Along = "tokens"
    """Axis of the comparison: steps, if one of the runs counts no tokens."""
    behind: float | None = None
    """Tokens or steps that the other run needed fewer for the current loss; negative: more."""
    behind_steps: float | None = None
    """The same in steps of this run."""
    is_at_least: bool = False
    """Whether the other run never reached this loss, so that the lead is at least this large."""
    no_comparison: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """Return the forecast that the API returned as display text."""
        return [
            (what, text)
            for what, text in (
                ("end", self.end_text()),
                ("final loss", self.loss_text()),
                ("against", self.comparison_text()),
            )
            if text
        ]

    def end_text(self) -> str:
        """Return when the run ends by the API's forecast, or why that is unknown."""
        if not self.finish_unix_ns:
            is_over = 0 < self.total_steps <= self.last_step + 1
            return self.no_finish if is_over else f"not known: {self.no_finish}"

        def left(unix_ns: int) -> str:
            return humanize_seconds(max(unix_ns - self.asked_unix_ns, 0) // 10**9)

        at = datetime.fromtimestamp(self.finish_unix_ns // 10**9, tz=UTC)
        text = (
            f"{at:%Y-%m-%d %H:%M}Z, in {left(self.finish_unix_ns)} "
            f"({left(self.finish_low_unix_ns)} to {left(self.finish_high_unix_ns)}): "
            f"step {self.last_step + 1:,} of {self.total_steps:,}"
        )
        if self.seconds_per_step is not None and self.step_ratio is not None:
            text += (
                f", {humanize_seconds(self.seconds_per_step)} each, all counted; "
                f"{100 * self.step_ratio:.0f} % of the time went to steps"
            )
        return f"{text}; it is stalled now" if self.is_waiting else text

    def loss_text(self) -> str:
        """Return the final loss in the API's forecast with its interval, or why it is unknown."""
        if self.final_loss is None:
            return f"not known: {self.no_final_loss}"
        return f"{self.final_loss:.4g} ({self.final_loss_low:.4g} to {self.final_loss_high:.4g})"

    def comparison_text(self) -> str:
        """Return the forecast's distance to the other run, or why it is unknown; "" without one."""
        if not self.against:
            return ""
        if self.behind is None:
            return f"{self.against}: {self.no_comparison}"
        if not self.behind:
            return f"level with {self.against}, as far as the noise lets one tell"
        where = "behind" if self.behind > 0 else "ahead of"
        steps = self.behind if self.behind_steps is None else self.behind_steps
        text = f"{where} {self.against} by {'at least ' if self.is_at_least else ''}"
        text += humanize_count(round(abs(steps)), "step")
        if self.along == "tokens":
            text += f" ({humanize(abs(self.behind), 'tokens')} tokens)"
        return f"{text}, at equal loss"


@route("GET", "/v1/runs/{run_id}/forecast", tag="look back")
class ForecastQuestion(PerRunQuestion[ForecastView], frozen=True, kw_only=True):
    """Forecast of the end, the final loss, and the distance to another run."""

    total_steps: int = 0
    """That are planned; 0: what the run itself says."""
    other: str = ""
    """Id of the run it is compared with."""


class AnnotationView(msgspec.Struct, frozen=True, kw_only=True):
    """An annotation at a step, or a change announced with ``monitor.expect``."""

    step: int
    time_unix_ns: int
    text: str
    by: str
    """Empty where the training itself announced it."""


@route("GET", "/v1/runs/{run_id}/annotations", tag="look back")
class AnnotationsQuestion(PerRunQuestion[tuple[AnnotationView, ...]], frozen=True, kw_only=True):
    """What people wrote and the training announced, by step."""


class AnnotationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new annotation at a step."""

    step: int
    text: str
    by: str = ""


class LostWork(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of an incident; None: not measured."""

    steps: int = 0
    """Skipped updates, and steps that a rollback or a restart discarded."""
    batches: int = 0
    """Batches that rollbacks skipped."""
    tokens: int | None = None
    """Tokens of these steps, of the whole run."""
    seconds: float | None = None
    """How long rank 0 took for the steps."""
    gpu_hours: float | None = None
    """These seconds on every GPU of the run."""
    money: float | None = None
    """``gpu_hours`` at the price of a GPU-hour, if one is set."""
    down_seconds: float | None = None
    """From the last step before a restart to the first one after it."""


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an incident's timeline."""

    time_unix_ns: int
    step: int
    """-1 where it is of no step."""
    text: str


class VerdictView(msgspec.Struct, frozen=True, kw_only=True):
    """State, cause, action, cost, precedent and the next command, as display text."""

    incident_id: str = ""
    """The incident it is about; empty where the run had none."""
    state: str
    is_hung: bool = False
    """No step ends, though the run has not ended: ``state`` says since when."""
    cause: str = ""
    action: str = ""
    cost: str = ""
    before: str = ""
    """Whether it happened before, in this run and in others."""
    next: str = ""
    """What to do."""
    played: str = ""
    """Verdict of `vitals repro` for the bad step; empty if it was not run, and from a collector,
    which does not read the run directory."""
    commands: tuple[str, ...] = ()
    """To be copied, the next one first."""
    lost: LostWork = LostWork()
    timeline: tuple[TimelineEntry, ...] = ()


class IncidentLine(msgspec.Struct, frozen=True, kw_only=True):
    """One incident in a list."""

    incident_id: str
    title: str
    severity: Severity
    is_open: bool
    is_resolved: bool = True
    """Whether healthy steps followed; neither open nor resolved: it lasted to the run's end."""
    onset_step: int
    last_step: int
    started_unix_ns: int
    alerts: tuple[str, ...]
    """Fingerprints of its alerts."""


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a run, and its incidents, the newest first."""

    run_id: str
    verdict: VerdictView
    """For the most severe open incident; if all are resolved, for the latest with an action."""
    incidents: tuple[IncidentLine, ...]


@route("GET", "/v1/runs/{run_id}/verdict", tag="look back")
class VerdictQuestion(PerRunQuestion[RunVerdict], frozen=True, kw_only=True):
    """State, cause, action, cost, precedent and the next command of a run."""

    judgement: bool = True
    """Whether to judge; without it only the incidents are filled, and no rows are read."""


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs together in time and cause: findings, decisions, alerts, and what was seen."""

    incident_id: str
    """The same in every answer: ATTEMPT-STEP-CAUSE, which of the run's attempts (1, 2, ...) and the
    step it began at."""
    run_id: str
    title: str
    severity: Severity
    is_open: bool
    is_resolved: bool = True
    """Whether healthy steps followed; neither open nor resolved: it lasted to the run's end."""
    onset_step: int
    last_step: int
    started_unix_ns: int
    ended_unix_ns: int
    verdict: VerdictView
    story: tuple[str, ...]
    """The paragraphs of the answer: what began, where, what was done, how it ended, its cost."""
    cost_steps: int
    """Lost steps: skipped and discarded ones."""
    cost_seconds: float
    decisions: tuple[DecisionView, ...]
    findings: tuple[FindingView, ...]
    alerts: tuple[AlertView, ...]
    events: tuple[EventView, ...]
    data: tuple[StepData, ...]


@route("GET", "/v1/runs/{run_id}/incidents", tag="look back")
class IncidentsQuestion(PerRunQuestion[tuple[IncidentView, ...]], frozen=True, kw_only=True):
    """Incidents with their story, latest first."""

    incident_id: str = ""
    """Only the incident with this id; "" for all."""


class TableReply(msgspec.Struct, frozen=True, kw_only=True):
    """A table by columns, all of one length."""

    columns: tuple[str, ...]
    data: tuple[tuple[str | float | int | bool | None, ...], ...]
    """``data[column][row]``; numbers that are not finite are the texts nan, inf and -inf."""
    num_total: int
    """Rows that met the conditions; more than there are here where ``limit`` cut them."""
    num_discarded: int = 0
    """Discarded rows that were not read, because the branch was ``lineage``."""


@route("POST", "/v1/tables", tag="look back")
class TableQuestion(Question[TableReply], frozen=True, kw_only=True):
    """The rows of a table that meet conditions, ``COLUMN OP VALUE`` each."""

    table: TableName
    run_id: str = ""
    """Id of a run; empty: all runs. Required for steps and ranks."""
    where: tuple[str, ...] = ()
    """Conditions that all hold: ``loss > 3``, ``rank = 2``, ``name ~ gpt``."""
    columns: tuple[str, ...] = ()
    """Empty: all of them."""
    branch: Branch = "all"
    """For steps and ranks: with ``all``, a step that was trained again has one row per attempt."""
    from_step: int | None = None
    to_step: int | None = None
    newest_first: bool = False
    limit: int = 1_000


class AckRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Acknowledge or silence an alert."""

    by: str
    reason: str = ""
    silence_seconds: float = 0.0


class SilenceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Silence all alerts that fit every matcher, for a while."""

    matchers: tuple[str, ...]
    """Words such as ``severity=notify``, ``name=~Gpu.*``, ``run=ID`` or ``LABEL=VALUE``."""
    by: str
    reason: str
    seconds: float
    starts_unix_ns: int = 0
    """When a maintenance window begins; 0 is now."""


class SilenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A silence: by matchers, or of one alert."""

    id: int
    matchers: tuple[str, ...]
    """Empty for a silence of one alert."""
    fingerprint: str = ""
    """Fingerprint of the silenced alert."""
    by: str
    reason: str
    starts_unix_ns: int
    ends_unix_ns: int
    num_firing: int
    """Pending and firing alerts that it silences now."""


@route("GET", "/v1/silences", tag="alerts")
class SilencesQuestion(Question[tuple[SilenceView, ...]], frozen=True, kw_only=True):
    """The silences that are in force or to come; the one that ends first is first."""


class EndSilenceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a silence early."""

    by: str
    reason: str = ""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error answer."""

    code: str
    text: str
    hint: str = ""
