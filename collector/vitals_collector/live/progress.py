"""How far the watchers are with each run, as it is stored: what is unread, and what is left."""

from itertools import groupby

import msgspec
from sqlalchemy import Connection, delete, select

from vitals_collector.live.tail_reader import HOSTS, WATCHED
from vitals_collector.storage.schema import engine_state, streams
from vitals_collector.storage.store import insert

_ASIDE = "watching-aside/"


def state_name(run_id: str) -> str:
    """Return the name under which a run's state is kept in ``engine_state``."""
    return f"watching/{run_id}"


class _Done(msgspec.Struct):
    done: dict[str, int] = {}


def watched_to(connection: Connection, run_id: str) -> dict[str, int]:
    """Return by ``incarnation/stream`` up to which row the watchers are done with a run."""
    query = select(engine_state.c.body).where(engine_state.c.name == state_name(run_id))
    body = connection.execute(query).scalar()
    return {} if body is None else msgspec.msgpack.decode(body, type=_Done).done


def unread_runs(connection: Connection) -> list[str]:
    """Return the runs of which more is stored than the watchers are done with.

    The newest sample of a host always waits for the next one of its node.
    """
    table = streams.c
    query = select(table.run_id, table.incarnation, table.stream, table.last_seq)
    query = query.where(table.stream.in_(sorted(WATCHED))).order_by(table.run_id)
    unread = []
    for run_id, rows in groupby(connection.execute(query).all(), key=lambda row: row.run_id):
        done = watched_to(connection, run_id)
        for row in rows:
            num = row.last_seq - done.get(f"{row.incarnation}/{row.stream}", -1)
            if num > (1 if row.stream in HOSTS else 0):
                unread.append(run_id)
                break
    return unread


def set_aside(connection: Connection, run_id: str) -> None:
    """Note that watching a run fails again and again: its rows wait for nobody any more."""
    statement = insert(connection, engine_state).values(name=_ASIDE + run_id, body=b"")
    connection.execute(statement.on_conflict_do_nothing(index_elements=["name"]))


def take_up(connection: Connection, run_id: str) -> None:
    """Note that a run which was set aside is watched again."""
    connection.execute(delete(engine_state).where(engine_state.c.name == _ASIDE + run_id))


def runs_aside(connection: Connection) -> set[str]:
    """Return the runs that were set aside."""
    query = select(engine_state.c.name).where(engine_state.c.name.startswith(_ASIDE))
    return {name.removeprefix(_ASIDE) for name in connection.execute(query).scalars()}


def forget_progress(connection: Connection, run_id: str) -> None:
    """Forget how far a run was watched: it is removed."""
    names = (state_name(run_id), _ASIDE + run_id)
    connection.execute(delete(engine_state).where(engine_state.c.name.in_(names)))


__all__ = [
    *("forget_progress", "runs_aside", "set_aside"),
    *("state_name", "take_up", "unread_runs", "watched_to"),
]
