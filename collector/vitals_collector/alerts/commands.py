"""Commands to runs: validated, stored, delivered, and never deleted.

A command is a proposal to the escalation policy inside the job. It is applied at most once: its
number only grows, it expires, and the training verifies both again. It is signed with an operator's
control key, which the collector does not have: it can change nothing in it, and agent and run
refuse a forged one. In the mailbox the run's own key, a file with mode 0600 in the run directory,
signs as well. The agent adds that signature, or this collector if it watches the directory itself.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from sqlalchemy import Connection, Row, func, insert, select, update

from trainvitals.errors import UnauthorizedError, UsageError, VitalsError
from trainvitals.identity import check_run_id
from trainvitals.io.control_key import verify_manual_command
from trainvitals.io.mailbox import check_time, sign_command
from trainvitals.io.rundir import RunDir
from trainvitals.records import Command
from trainvitals.redaction import redact_text
from trainvitals.views import CommandRequest, CommandView
from vitals_collector.storage.schema import checkpoints, commands, runs, sources
from vitals_collector.storage.store import UNKNOWN, Store, unknown_run, write_audit

CONFLICT = "V102"
"""Error code: the command exists, in a state that does not allow this."""

MAX_PENDING = 16
MAX_LISTED = 1_000

_LOG = logging.getLogger("vitals.collector.commands")
_decode = msgspec.msgpack.Decoder(Command).decode


def issue(
    store: Store,
    run_id: str,
    command: Command,
    *,
    keys: Path,
    now_unix_ns: int,
    folders: Sequence[Path] = (),
) -> CommandView:
    """Store a signed command for the run, durably; deliver it if its directory is watched.

    ``keys`` is the directory of ``control.pub``, ``folders`` are watched run directories.

    Raises:
        UnauthorizedError: it is not signed with the control key.
        UsageError: unknown run, checkpoint or step, an action not offered, a value out of bounds,
            a clock that differs, or too many commands that still wait.
    """
    verify_manual_command(command, keys)
    request = CommandRequest.from_command(command)
    request.check()
    check_run_id(run_id)
    if command.run_id != run_id:
        raise UsageError(f"the command is for run {command.run_id}, not {run_id}")
    check_time(command, now_unix_ns)
    with store.write() as connection:
        _check_run(connection, run_id, now_unix_ns)
        check_checkpoint(request.checkpoint_id, _load_checkpoint_states(connection, run_id))
        check_accepted_step(request, _last_step(connection, run_id))
        _check_number(connection, command)
        connection.execute(insert(commands).values(_command_row(command)))
        who = f"{command.issued_by} (control key)"
        # Signed by then: only the copy for the audit can be redacted. Ours are before they are.
        reason = redact_text(command.reason)
        action = f"command {command.action}"
        write_audit(connection, now_unix_ns, who, action, _subject(command), reason)
    view = CommandView(command=command, status="pending")
    if _deliver_to_run_dir(command, folders):
        return mark_delivered(
            store, run_id, command.number, by="this collector", now_unix_ns=now_unix_ns
        )
    return view


def check_accepted_step(request: CommandRequest, last_step: int) -> None:
    """Refuse a command to accept a step that was not reached yet. Pure."""
    if request.action != "accept" or request.argument is None or request.argument <= last_step:
        return
    newest = f"its newest is step {last_step}" if last_step >= 0 else "it has no step so far"
    raise UsageError(
        f"step {request.argument:.0f} of the run is not there; {newest}",
        hint="`vitals show RUN` lists what Vitals did, and at which step",
        code=UNKNOWN,
    )


def list_commands(
    store: Store, run_id: str, *, now_unix_ns: int, status: str = ""
) -> tuple[CommandView, ...]:
    """Return the commands to a run, latest first; pending ones may be shown as expired."""
    query = (
        select(commands)
        .where(commands.c.run_id == run_id)
        .order_by(commands.c.number.desc())
        .limit(MAX_LISTED)
    )
    with store.read_transaction() as connection:
        views = [_command_view(row, now_unix_ns) for row in connection.execute(query)]
    return tuple(view for view in views if status in ("", view.status))


def mark_delivered(
    store: Store,
    run_id: str,
    number: int,
    *,
    by: str,
    now_unix_ns: int,
    incarnation: str | None = None,
) -> CommandView:
    """Record that the command is in the run's mailbox; repeating it has no effect.

    Only the agent that holds the run knows the ``incarnation`` of the run's rank 0. It is None if
    this collector delivered the command in the directory itself.

    Raises:
        UnauthorizedError: that is not the latest start of the run's rank 0.
        UsageError: the command does not exist, or expired before its delivery.
    """
    conditions = (commands.c.run_id == run_id, commands.c.number == number)
    with store.write() as connection:
        if incarnation is not None and incarnation != _rank0(connection, run_id):
            raise UnauthorizedError(
                f"only the agent on rank 0's node of run {run_id} can say that a command was"
                " delivered",
                hint="it reports again in its next cycle, once that rank's rows are stored",
            )
        row = connection.execute(select(commands).where(*conditions)).one_or_none()
        if row is None:
            raise UsageError(f"run {run_id} has no command {number}", code=UNKNOWN)
        view = _command_view(row, now_unix_ns)
        if view.status == "expired" and row.status == "pending":
            raise UsageError(
                f"command {number} expired before it was delivered",
                hint="issue it again",
                code=CONFLICT,
            )
        if view.status != "pending":
            return view
        values = {"status": "delivered", "updated_unix_ns": now_unix_ns}
        connection.execute(update(commands).where(*conditions).values(values))
        write_audit(connection, now_unix_ns, by, "delivered", _subject(view.command), "")
    return msgspec.structs.replace(view, status="delivered")


def expire_commands(store: Store, now_unix_ns: int) -> int:
    """Mark pending commands to runs that have expired; return their number."""
    late = (commands.c.status == "pending", commands.c.expires_unix_ns <= now_unix_ns)
    with store.read_transaction() as connection:
        if connection.execute(select(commands.c.number).where(*late).limit(1)).first() is None:
            return 0  # the usual case acquires no write lock
    with store.write() as connection:
        rows = connection.execute(select(commands.c.body).where(*late)).scalars().all()
        values = {"status": "expired", "updated_unix_ns": now_unix_ns}
        connection.execute(
            update(commands)
            .where(*late)
            .values(values | {"detail": "it expired before the run took it"})
        )
        for body in rows:
            subject = _subject(_decode(body))
            write_audit(connection, now_unix_ns, "collector", "expired", subject, "")
    return len(rows)


def count_commands(store: Store) -> dict[str, int]:
    """Return the number of commands to runs by status."""
    query = select(commands.c.status, func.count()).group_by(commands.c.status)
    with store.read_transaction() as connection:
        return {str(status): int(num) for status, num in connection.execute(query)}


def _check_run(connection: Connection, run_id: str, now_unix_ns: int) -> None:
    """Refuse a command to an unknown run, or to one with too many pending commands."""
    run_row = connection.execute(select(runs.c.run_id).where(runs.c.run_id == run_id)).first()
    if run_row is None:
        raise unknown_run(run_id)
    waiting = connection.execute(
        select(func.count()).where(
            commands.c.run_id == run_id,
            commands.c.status == "pending",
            commands.c.expires_unix_ns > now_unix_ns,
        )
    ).scalar_one()
    if waiting >= MAX_PENDING:
        raise UsageError(
            f"{waiting} commands for this run still wait; at most {MAX_PENDING} may",
            hint="is an agent running on its node? they expire by themselves",
            code=CONFLICT,
        )


def _load_checkpoint_states(connection: Connection, run_id: str) -> list[tuple[str, str]]:
    """Return id and state of each announced checkpoint, by which a rollback command is checked."""
    query = select(checkpoints.c.checkpoint_id, checkpoints.c.state).where(
        checkpoints.c.run_id == run_id
    )
    return [(name, state) for name, state in connection.execute(query)]


def _last_step(connection: Connection, run_id: str) -> int:
    """Return the run's latest step, which a command to accept a step is checked by."""
    query = select(func.max(sources.c.last_step)).where(sources.c.run_id == run_id)
    newest = connection.execute(query).scalar()
    return -1 if newest is None else int(newest)


def check_checkpoint(checkpoint_id: str, announced: Iterable[tuple[str, str]]) -> None:
    """Refuse a command to roll back to a checkpoint that is not announced or not healthy. Pure.

    An empty id is the latest healthy one, chosen by the run. ``announced`` has the id and the state
    of each of its checkpoints.

    Raises:
        UsageError: it names those that are healthy.
    """
    if not checkpoint_id:
        return
    states: dict[str, set[str]] = {}
    for name, state in announced:
        states.setdefault(name, set()).add(state)
    announced_states = states.get(checkpoint_id, set())
    if "healthy" in announced_states:
        return
    healthy = sorted(name for name, of in states.items() if "healthy" in of)[-5:]
    hint = f"healthy are {', '.join(healthy)}" if healthy else "none is healthy at present"
    if not announced_states:
        # Never echoed as a path: only ids that the run itself announced exist here.
        raise UsageError(
            f"checkpoint_id is {checkpoint_id[:80]!r}; the run announced none of that name",
            hint=hint,
            code=UNKNOWN,
        )
    raise UsageError(
        f"checkpoint {checkpoint_id} is {' and '.join(sorted(announced_states))}; "
        "only a healthy one can be rolled back to",
        hint=hint,
        code=CONFLICT,
    )


def _check_number(connection: Connection, command: Command) -> None:
    """Refuse a command that is not newer than all of the run: sent again, or overtaken."""
    last = connection.execute(
        select(func.max(commands.c.number)).where(commands.c.run_id == command.run_id)
    ).scalar()
    if last is not None and command.number <= last:
        raise UsageError(
            f"command {command.number} is not newer than {last}, the run's newest",
            hint="issue it again: each is taken once",
            code=CONFLICT,
        )


def _rank0(connection: Connection, run_id: str) -> str | None:
    """Return the incarnation of rank 0's latest start, which may report a command as delivered."""
    query = (
        select(sources.c.incarnation)
        .where(sources.c.run_id == run_id, sources.c.source == "rank:0")
        .order_by(sources.c.started_unix_ns.desc())
        .limit(1)
    )
    return connection.execute(query).scalar()


def _command_row(command: Command) -> dict[str, object]:
    return {
        "run_id": command.run_id,
        "number": command.number,
        "action": command.action,
        "issued_by": command.issued_by,
        "issued_unix_ns": command.issued_unix_ns,
        "expires_unix_ns": command.expires_unix_ns,
        "status": "pending",
        "updated_unix_ns": command.issued_unix_ns,
        "body": msgspec.msgpack.encode(command),
    }


def _command_view(row: Row[tuple[object, ...]], now_unix_ns: int) -> CommandView:
    """Return a stored command for clients; a late pending one is shown as expired."""
    late = row.status == "pending" and row.expires_unix_ns <= now_unix_ns
    return CommandView(
        command=_decode(row.body),
        status="expired" if late else row.status,
        detail=row.detail,
        step=row.step,
    )


def _deliver_to_run_dir(command: Command, folders: Iterable[Path]) -> bool:
    """Sign the command and deliver it to the run's own directory, if that is watched.

    It was verified, and this is the run's owner: the run need not know this collector's key.
    """
    plain = msgspec.structs.replace(command, control_signature="")
    for folder in folders:
        # The id was verified to be a ULID; no other part of the request is used in a path.
        path = folder if folder.name == command.run_id else folder / command.run_id
        if not path.is_dir():
            continue
        try:
            run_dir = RunDir.open(path)
            run_dir.put_command(sign_command(plain, run_dir.command_key()))
        except (VitalsError, OSError) as error:
            _LOG.warning("command %d stays pending: %s", command.number, error)
            continue
        return True
    return False


def _subject(command: Command) -> str:
    """Return the name of a command in the audit log."""
    return f"{command.run_id}/{command.number}"
