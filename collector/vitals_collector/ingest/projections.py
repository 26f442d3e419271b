"""Turns events into the rows that users filter by: runs, attempts, decisions, checkpoints etc.

Applied in the transaction that stores the events' bytes, each event once. If a row is a current
state, the latest event by its own time wins, so the order in which spools arrive does not matter.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, bindparam, case, select, update

from trainvitals.identity import Identity
from trainvitals.records import (
    AttemptStarted,
    BatchNoted,
    ChangeExpected,
    CheckpointChanged,
    CommandAcknowledged,
    DataWindowSkipped,
    DecisionMade,
    Event,
    EventRow,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    RanksStill,
    RankStarted,
    RunEnded,
    RunInfo,
    RunStarted,
    StacksTaken,
    StateRead,
    TrainingPaused,
)
from trainvitals.rows import Schema, column_of
from trainvitals.units import humanize_count
from vitals_collector.storage.schema import (
    attempts,
    checkpoints,
    commands,
    decisions,
    events,
    findings,
    names,
    runs,
    sources,
)
from vitals_collector.storage.store import insert, remove_nul, upsert

_encode = msgspec.msgpack.encode
_decode_info = msgspec.msgpack.Decoder(RunInfo).decode

_E = TypeVar("_E")
_Received = tuple[Identity, EventRow, _E]
"""An event of a writer."""
MAX_SAMPLES = 64
"""Maximum number of sample ids in a display line."""


def apply_events(
    connection: Connection, events_by_writer: Sequence[tuple[Identity, Sequence[EventRow]]]
) -> None:
    """Store each writer's events, and apply those of each type in order.

    Each type has its own tables. Types with many events have one statement for all of them, because
    SQLAlchemy needs longer to build a statement than the database to store a row.
    """
    received = [(identity, row, row.event) for identity, rows in events_by_writer for row in rows]
    if received:
        connection.execute(events.insert(), [_event_row(*each) for each in received])
    received.sort(key=lambda each: type(each[2]).__name__)  # stable
    for event_type, of_type in groupby(received, key=lambda each: type(each[2])):
        if event_type in _BY_TYPE:
            _BY_TYPE[event_type](connection, of_type)
        elif event_type in _BY_EVENT:
            for each in of_type:
                _BY_EVENT[event_type](connection, *each)


def note_processes(
    connection: Connection, process_rows: Iterable[tuple[str, Schema, npt.NDArray[np.void]]]
) -> None:
    """Store the agents' latest reports about each rank's process: whether it exists."""
    last: dict[tuple[str, int, int], int] = {}
    for run_id, schema, rows in process_rows:
        ranks, has_rank = column_of(schema, rows, "rank")
        pids, _ = column_of(schema, rows, "pid")
        alive, has_alive = column_of(schema, rows, "alive")
        for i in np.flatnonzero(has_rank & has_alive):
            last[run_id, int(ranks[i]), int(pids[i])] = int(alive[i] != 0)
    alive_updates = [
        {"of_run": run_id, "of_source": f"rank:{rank}", "of_pid": pid, "is_alive": is_alive}
        for (run_id, rank, pid), is_alive in last.items()
    ]
    if alive_updates:
        connection.execute(_ALIVE, alive_updates)


def loss_kind_of(connection: Connection, run_id: str) -> str:
    """Return the loss kind that the run's start event reported; "minimize" if it reported none."""
    body = connection.execute(select(runs.c.info).where(runs.c.run_id == run_id)).scalar()
    kind = _decode_info(body).judge.get("loss_kind") if body else None
    return kind if isinstance(kind, str) else "minimize"


def stored_info(connection: Connection, run_id: str) -> bytes | None:
    """Return the information of the run's start event as stored; None if none is."""
    return connection.execute(select(runs.c.info).where(runs.c.run_id == run_id)).scalar() or None


def task_of(info: bytes) -> str:
    """Return the kind of post-training in a stored start event's information; empty without one."""
    return _decode_info(info).task


def describe_event(event: Event | None) -> str:
    """Return a display line for a stored event."""
    match event:
        case None:
            return "an event of a type that this version does not know"
        case RunStarted(info=info):
            ranks = humanize_count(info.world_size, "rank")
            return f"run {info.name or '(no name)'} started on {ranks}, {info.mode}"
        case RankStarted():
            return f"rank {event.rank} started on {event.node} as process {event.pid}"
        case AttemptStarted(parent=None):
            return f"first attempt: {event.reason}"
        case AttemptStarted():
            return f"new attempt from step {event.fork_step}: {event.reason}"
        case NamesDefined():
            return f"{humanize_count(len(event.names), 'name')} of {event.stream}"
        case FindingRaised(finding=finding):
            return finding.reason
        case DecisionMade(decision=decision):
            return f"{decision.action}: {decision.reason}"
        case StateRead():
            from trainvitals.policy.evidence import describe_reading  # rare, and much to import

            return describe_reading(event)
        case CommandAcknowledged(ack=ack):
            return f"command {ack.number} {ack.status}: {ack.detail}"
        case TrainingPaused():
            return f"{'paused' if event.is_paused else 'goes on'}: {event.reason}"
        case CheckpointChanged():
            return f"checkpoint {event.checkpoint_id} is {event.state} ({event.where})"
        case DataWindowSkipped():
            begin, end = event.first_batch, event.last_batch - 1
            window = f"batches {begin} to {end}" if end > begin else f"batch {begin}"
            return f"{window} of epoch {event.epoch} skipped: {event.reason}"
        case BatchNoted():
            first = f"{event.num_batches} from batch {event.first_batch} of epoch {event.epoch} on"
            return f"fed by {first}: {describe_samples(event)}"
        case ChangeExpected():
            return f"a change is expected for {humanize_count(event.steps, 'step')}: {event.reason}"
        case RanksStill(ranks=()):
            return "the ranks of this node move again"
        case RanksStill():
            still = min(rank.still_seconds for rank in event.ranks)
            ranks = humanize_count(len(event.ranks), "rank")
            return f"no progress of {ranks} of this node for {still:.1f} s"
        case StacksTaken():
            last = event.stacks.rstrip().rpartition("(most recent call first):")[2].strip()
            at = last.splitlines()[0].strip() if last else event.detail
            return f"stacks of rank {event.rank}: {at or 'none'}"
        case Note():
            return f"{event.text} [{event.code}]"
        case RunEnded():
            return f"{event.state}: {event.reason}" if event.reason else event.state


def describe_samples(batch: BatchNoted) -> str:
    """Return a sentence about the training samples of a batch that a stored event notes."""
    if not batch.sample_ids:
        return "samples not known"
    shown = ", ".join(str(sample_id) for sample_id in batch.sample_ids[:MAX_SAMPLES])
    num = max(batch.num_samples, len(batch.sample_ids))
    return f"samples {shown}" + (f" and {num - MAX_SAMPLES} more" if num > MAX_SAMPLES else "")


def _event_row(identity: Identity, row: EventRow, event: Event | None) -> dict[str, Any]:
    return {
        "run_id": identity.run_id,
        "incarnation": identity.incarnation,
        "seq": row.seq,
        "source": identity.source,
        "time_unix_ns": row.time_unix_ns,
        "step": row.step,
        "attempt": row.attempt,
        "kind": "Unknown" if event is None else type(event).__name__,
        "summary": remove_nul(describe_event(event)),
        "body": b"" if event is None else _encode(event),
    }


def _run_started(
    connection: Connection, identity: Identity, row: EventRow, event: RunStarted
) -> None:
    """Store the attributes of a run, from the event at its start."""
    info = event.info
    first = case(
        (runs.c.info_unix_ns == 0, row.time_unix_ns),
        (runs.c.started_unix_ns > row.time_unix_ns, row.time_unix_ns),
        else_=runs.c.started_unix_ns,
    )
    condition = runs.c.run_id == identity.run_id
    connection.execute(update(runs).where(condition).values(started_unix_ns=first))
    connection.execute(
        update(runs)
        .where(condition, runs.c.info_unix_ns <= row.time_unix_ns)
        .values(
            name=remove_nul(info.name),
            # Without a project: that of the token that started the run, if it has one.
            project=remove_nul(info.project) or runs.c.project,
            user_name=remove_nul(info.user),
            mode=remove_nul(info.mode),
            world_size=info.world_size,
            info=_encode(info),
            info_unix_ns=row.time_unix_ns,
        )
    )


def _attempt_started(
    connection: Connection, identity: Identity, row: EventRow, event: AttemptStarted
) -> None:
    """Store an attempt of the run, from the event at its start."""
    values = {
        "run_id": identity.run_id,
        "id": event.id,
        "parent": event.parent,
        "fork_step": event.fork_step,
        "started_unix_ns": row.time_unix_ns,
        "reason": remove_nul(event.reason),
    }
    connection.execute(insert(connection, attempts).values(values).on_conflict_do_nothing())


def _names_defined(connection: Connection, received: Iterable[_Received[NamesDefined]]) -> None:
    """Store the names that writers gave to their layers or scalars, from their events."""
    rows = [
        {
            "run_id": identity.run_id,
            "incarnation": identity.incarnation,
            "stream": event.stream[:16],
            "id": number,
            "name": remove_nul(name),
        }
        for identity, _, event in received
        for number, name in event.names.items()
    ]
    upsert(connection, names, *rows)


def _findings_raised(connection: Connection, received: Iterable[_Received[FindingRaised]]) -> None:
    """Store the findings of ranks, from received events."""
    rows = [
        _event_key(identity, row) | finding_columns(event.finding, row.attempt)
        for identity, row, event in received
    ]
    connection.execute(findings.insert(), rows)


def finding_columns(finding: Finding, attempt: int) -> dict[str, Any]:
    """Return the columns of ``findings`` in addition to the key and the time."""
    return {
        "step": finding.step,
        "attempt": attempt,
        "rank": finding.rank,
        "kind": remove_nul(finding.kind),
        "level": finding.level,
        "detector": remove_nul(finding.detector),
        "body": _encode(finding),
    }


def _decisions_made(connection: Connection, received: Iterable[_Received[DecisionMade]]) -> None:
    """Store the decisions of policies, from received events."""
    connection.execute(decisions.insert(), [_decision_row(*each) for each in received])


def _decision_row(identity: Identity, row: EventRow, event: DecisionMade) -> dict[str, Any]:
    decision = event.decision
    return _event_key(identity, row) | {
        "ledger_seq": decision.ledger_seq,
        "action": decision.action,
        "step": decision.step,
        "decided_at_step": decision.decided_at_step,
        "attempt": decision.attempt,
        "rule": remove_nul(decision.rule),
        "cause": remove_nul(decision.cause),
        "rank": decision.rank,
        "acted": decision.acted,
        "body": _encode(decision),
    }


def _command_acknowledged(
    connection: Connection, identity: Identity, row: EventRow, event: CommandAcknowledged
) -> None:
    """Store the status of a manual command, as the run reported it."""
    ack = event.ack
    conditions = (commands.c.run_id == identity.run_id, commands.c.number == ack.number)
    connection.execute(
        update(commands)
        .where(*conditions)
        .values(
            status=ack.status,
            detail=remove_nul(ack.detail),
            step=ack.step,
            updated_unix_ns=row.time_unix_ns,
        )
    )


def _checkpoints_changed(
    connection: Connection, received: Iterable[_Received[CheckpointChanged]]
) -> None:
    """Store the new states of checkpoints, unless a later one is stored."""
    rows = [
        {
            "run_id": identity.run_id,
            "checkpoint_id": remove_nul(event.checkpoint_id)[:255],
            "place": event.where,
            "step": event.checkpoint_step,
            "attempt": row.attempt,
            "state": event.state,
            "num_bytes": event.num_bytes,
            "detail": remove_nul(event.detail),
            "time_unix_ns": row.time_unix_ns,
        }
        for identity, row, event in received
    ]
    upsert(connection, checkpoints, *rows, newer_by="time_unix_ns")


def _run_ended(connection: Connection, identity: Identity, row: EventRow, event: RunEnded) -> None:
    """Store how and why a writer of the run ended, from its last event."""
    conditions = (
        sources.c.run_id == identity.run_id,
        sources.c.incarnation == identity.incarnation,
    )
    connection.execute(
        update(sources)
        .where(*conditions)
        .values(
            ended_state=event.state,
            ended_reason=remove_nul(event.reason),
            ended_unix_ns=row.time_unix_ns,
        )
    )


def _event_key(identity: Identity, row: EventRow) -> dict[str, Any]:
    """Return the key columns of a received event, and its time."""
    return {
        "run_id": identity.run_id,
        "incarnation": identity.incarnation,
        "seq": row.seq,
        "time_unix_ns": row.time_unix_ns,
    }


# A state that is repeated every few seconds is not written again.
_ALIVE = (
    update(sources)
    .where(
        sources.c.run_id == bindparam("of_run"),
        sources.c.source == bindparam("of_source"),
        sources.c.pid == bindparam("of_pid"),
        sources.c.alive != bindparam("is_alive"),
    )
    .values(alive=bindparam("is_alive"))
)

_BY_TYPE: dict[type, Callable[[Connection, Iterable[_Received[Any]]], None]] = {
    NamesDefined: _names_defined,
    FindingRaised: _findings_raised,
    DecisionMade: _decisions_made,
    CheckpointChanged: _checkpoints_changed,
}
_BY_EVENT: dict[type, Callable[[Connection, Identity, EventRow, Any], None]] = {
    RunStarted: _run_started,
    AttemptStarted: _attempt_started,
    CommandAcknowledged: _command_acknowledged,
    RunEnded: _run_ended,
}
