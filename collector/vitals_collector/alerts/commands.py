"""Commands on their way to a run: checked, stored, handed out, and kept for ever.

A command is a proposal to the ladder inside the job. It arrives at most once: it has a number that
only grows, it expires, and the training verifies both again. What the collector stores is unsigned:
only the run's own key signs, and that lies 0600 beside the run. The agent there signs, or, where
this collector watches the very folder, the collector does.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from sqlalchemy import Connection, Row, func, insert, select, update

from trainvitals.errors import UsageError, VitalsError
from trainvitals.identity import check_run_id
from trainvitals.io.mailbox import sign_command
from trainvitals.io.rundir import RunDir
from trainvitals.records import Command
from trainvitals.views import CommandRequest, CommandView
from vitals_collector.storage.schema import audit, checkpoints, commands, runs, sources
from vitals_collector.storage.store import UNKNOWN, Store, unknown_run

CONFLICT = "V102"
"""Error code: it is there, and in a state that does not allow this."""

OFFERED = ("halt", "rollback", "accept")
MAX_PENDING = 16
MAX_TTL_SECONDS = 3_600.0
MAX_REASON = 500
MAX_LISTED = 1_000
MAX_STEP = 2**53
"""A command's argument travels as a float64."""

_LOG = logging.getLogger("vitals.collector.commands")
_decode = msgspec.msgpack.Decoder(Command).decode


def issue(
    store: Store,
    run_id: str,
    request: CommandRequest,
    *,
    issued_by: str,
    now_unix_ns: int,
    folders: Sequence[Path] = (),
) -> CommandView:
    """Store a command for the run, durably, and leave it in the run's folder where one is watched.

    Raises:
        UsageError: unknown run, checkpoint or step, an action not offered, a value out of bounds,
            or too many commands that still wait.
    """
    check_request(request)
    check_run_id(run_id)
    with store.write() as connection:
        _check_run(connection, run_id, now_unix_ns)
        check_checkpoint(request.checkpoint_id, _checkpoints(connection, run_id))
        check_step(request, _last_step(connection, run_id))
        number = _next_number(connection, run_id, now_unix_ns)
        command = make_command(
            run_id, request, number=number, issued_by=issued_by, now_unix_ns=now_unix_ns
        )
        connection.execute(insert(commands).values(_row_of(command)))
        _audit(
            connection, now_unix_ns, issued_by, f"command {command.action}", command, request.reason
        )
    view = CommandView(command=command, status="pending")
    if _leave_in_folder(command, folders):
        return mark_delivered(
            store, run_id, command.number, by="this collector", now_unix_ns=now_unix_ns
        )
    return view


def make_command(
    run_id: str, request: CommandRequest, *, number: int, issued_by: str, now_unix_ns: int
) -> Command:
    """Return the request as an unsigned command."""
    return Command(
        number=number,
        run_id=run_id,
        action=request.action,
        reason=request.reason,
        issued_by=issued_by,
        issued_unix_ns=now_unix_ns,
        expires_unix_ns=now_unix_ns + int(request.ttl_seconds * 1e9),
        checkpoint_id=request.checkpoint_id,
        argument=request.argument or 0.0,
    )


def check_request(request: CommandRequest) -> None:
    """Refuse what no run could be asked, whatever its state. Pure.

    Raises:
        UsageError: it names the field, the value and what is expected.
    """
    if request.action not in OFFERED:
        raise UsageError(
            f"action is {request.action!r}; this version does not yet offer it",
            hint=f"offered are {', '.join(OFFERED[:-1])} and {OFFERED[-1]}",
        )
    if not 0 < len(request.reason.strip()) <= MAX_REASON or not request.reason.isprintable():
        raise UsageError(
            f"reason has {len(request.reason)} characters; give 1 to {MAX_REASON} printable ones",
            hint="say why, with --reason on the command line; it is recorded in the run",
        )
    if not (math.isfinite(request.ttl_seconds) and 0 < request.ttl_seconds <= MAX_TTL_SECONDS):
        raise UsageError(
            f"ttl_seconds is {request.ttl_seconds}; it must be above 0 and at most "
            f"{MAX_TTL_SECONDS:g}"
        )
    if request.action == "accept":
        _check_argument(request.argument)
    elif request.argument not in (None, 0.0):
        raise UsageError(f"argument is {request.argument:g}; {request.action} takes none")
    if request.checkpoint_id and request.action != "rollback":
        raise UsageError(f"checkpoint_id was given; {request.action} takes none")


def _check_argument(argument: float | None) -> None:
    hint = "say which step was healthy: vitals command RUN accept STEP"
    if argument is None:
        raise UsageError("accept needs a step", hint=hint)
    if not (0 <= argument <= MAX_STEP and argument == math.floor(argument)):
        raise UsageError(f"accept is given step {argument:g}; it must be a whole number", hint=hint)


def check_step(request: CommandRequest, last_step: int) -> None:
    """Refuse to accept a step that nobody has seen yet. Pure.

    Raises:
        UsageError: it names the newest step.
    """
    if request.action != "accept" or request.argument is None or request.argument <= last_step:
        return
    newest = f"its newest is step {last_step}" if last_step >= 0 else "it has no step so far"
    raise UsageError(
        f"step {request.argument:.0f} of the run is not there; {newest}",
        hint="`vitals show RUN` lists what Vitals did, and at which step",
        code=UNKNOWN,
    )


def listed(
    store: Store, run_id: str, *, now_unix_ns: int, status: str = ""
) -> tuple[CommandView, ...]:
    """Return the run's newest commands, newest first; pending ones that expired say so."""
    query = (
        select(commands)
        .where(commands.c.run_id == run_id)
        .order_by(commands.c.number.desc())
        .limit(MAX_LISTED)
    )
    with store.read() as connection:
        views = [_view(row, now_unix_ns) for row in connection.execute(query)]
    return tuple(view for view in views if status in ("", view.status))


def mark_delivered(
    store: Store, run_id: str, number: int, *, by: str, now_unix_ns: int
) -> CommandView:
    """Note that the command lies in the run's mailbox; a second time changes nothing.

    Raises:
        UsageError: there is no such command, or it expired before it was taken.
    """
    mine = (commands.c.run_id == run_id, commands.c.number == number)
    with store.write() as connection:
        row = connection.execute(select(commands).where(*mine)).one_or_none()
        if row is None:
            raise UsageError(f"run {run_id} has no command {number}", code=UNKNOWN)
        view = _view(row, now_unix_ns)
        if view.status == "expired" and row.status == "pending":
            raise UsageError(
                f"command {number} expired before it was delivered",
                hint="issue it again",
                code=CONFLICT,
            )
        if view.status != "pending":
            return view
        values = {"status": "delivered", "updated_unix_ns": now_unix_ns}
        connection.execute(update(commands).where(*mine).values(values))
        _audit(connection, now_unix_ns, by, "delivered", view.command, "")
    return msgspec.structs.replace(view, status="delivered")


def expire(store: Store, now_unix_ns: int) -> int:
    """Give pending commands whose time is over their final status; return how many there were."""
    late = (commands.c.status == "pending", commands.c.expires_unix_ns <= now_unix_ns)
    with store.read() as connection:
        if connection.execute(select(commands.c.number).where(*late).limit(1)).first() is None:
            return 0  # the usual case takes no write lock
    with store.write() as connection:
        rows = connection.execute(select(commands.c.body).where(*late)).scalars().all()
        values = {"status": "expired", "updated_unix_ns": now_unix_ns}
        connection.execute(
            update(commands)
            .where(*late)
            .values(values | {"detail": "it expired before the run took it"})
        )
        for body in rows:
            _audit(connection, now_unix_ns, "collector", "expired", _decode(body), "")
    return len(rows)


def counts(store: Store) -> dict[str, int]:
    """Return the number of commands by status."""
    query = select(commands.c.status, func.count()).group_by(commands.c.status)
    with store.read() as connection:
        return {str(status): int(num) for status, num in connection.execute(query)}


def _check_run(connection: Connection, run_id: str, now_unix_ns: int) -> None:
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


def _checkpoints(connection: Connection, run_id: str) -> list[tuple[str, str]]:
    query = select(checkpoints.c.checkpoint_id, checkpoints.c.state).where(
        checkpoints.c.run_id == run_id
    )
    return [(name, state) for name, state in connection.execute(query)]


def _last_step(connection: Connection, run_id: str) -> int:
    query = select(func.max(sources.c.last_step)).where(sources.c.run_id == run_id)
    newest = connection.execute(query).scalar()
    return -1 if newest is None else int(newest)


def check_checkpoint(checkpoint_id: str, announced: Iterable[tuple[str, str]]) -> None:
    """Refuse a checkpoint that the run did not announce, or that is not healthy. Pure.

    Args:
        checkpoint_id: what was asked for; "" is the newest healthy one, which the run knows best.
        announced: the run's checkpoints, each as id and state.

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


def _next_number(connection: Connection, run_id: str, now_unix_ns: int) -> int:
    """Return the microsecond of issue, or one more than the last where the clock stood or fell."""
    last = connection.execute(
        select(func.max(commands.c.number)).where(commands.c.run_id == run_id)
    ).scalar()
    return max(now_unix_ns // 1_000, (last or 0) + 1)


def _row_of(command: Command) -> dict[str, object]:
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


def _view(row: Row[tuple[object, ...]], now_unix_ns: int) -> CommandView:
    late = row.status == "pending" and row.expires_unix_ns <= now_unix_ns
    return CommandView(
        command=_decode(row.body),
        status="expired" if late else row.status,
        detail=row.detail,
        step=row.step,
    )


def _leave_in_folder(command: Command, folders: Iterable[Path]) -> bool:
    """Sign the command and leave it in the run's own directory, where that is one we watch."""
    for folder in folders:
        # The id was checked to be a ULID; nothing else of the request becomes part of a path.
        path = folder if folder.name == command.run_id else folder / command.run_id
        if not path.is_dir():
            continue
        try:
            run_dir = RunDir.open(path)
            run_dir.put_command(sign_command(command, run_dir.command_key()))
        except (VitalsError, OSError) as error:
            _LOG.warning("command %d stays pending: %s", command.number, error)
            continue
        return True
    return False


def _audit(
    connection: Connection, now_unix_ns: int, actor: str, action: str, command: Command, detail: str
) -> None:
    connection.execute(
        insert(audit).values(
            time_unix_ns=now_unix_ns,
            actor=actor,
            action=action,
            subject=f"{command.run_id}/{command.number}",
            detail=detail,
        )
    )


__all__ = [
    "check_checkpoint",
    "check_request",
    "check_step",
    "counts",
    "expire",
    "issue",
    "listed",
    "make_command",
    "mark_delivered",
]
