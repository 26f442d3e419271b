"""Reports of run owners in the database, and their reading by the pager.

An owner's report is one row for each run, as bytes in the owner's format. It is valid as long as
the lease under which it was written: the pager ignores those of a former owner.
"""

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, delete, func, literal, select

from vitals_collector.cluster.leases import NOW, RUN
from vitals_collector.storage.schema import engine_state, leases
from vitals_collector.storage.store import OwnedElsewhere, save_states

_REPORT = "report/"


def load_runs_elsewhere(connection: Connection, holder: str) -> list[OwnedElsewhere]:
    """Return the runs of owners other than the holder, or its former process: one query."""
    report = engine_state.c.name == literal(_REPORT) + func.substr(leases.c.name, len(RUN) + 1)
    query = (
        select(leases.c.name, leases.c.epoch, engine_state.c.body)
        .select_from(leases.outerjoin(engine_state, report))
        .where(
            leases.c.name.startswith(RUN, autoescape=True),
            leases.c.expires_unix_ns > NOW,
            ~leases.c.holder.endswith("/" + holder.rpartition("/")[2], autoescape=True),
        )
    )
    return [
        OwnedElsewhere(row.name.removeprefix(RUN), row.epoch, row.body or b"")
        for row in connection.execute(query)
    ]


def write_reports(connection: Connection, bodies: Mapping[str, bytes]) -> None:
    """Store the reports of run owners, which the pager reads."""
    save_states(connection, {_REPORT + run_id: body for run_id, body in bodies.items()})


def delete_reports(connection: Connection, run_ids: Iterable[str]) -> None:
    """Delete the run owners' reports of these runs."""
    names = [_REPORT + run_id for run_id in run_ids]
    connection.execute(delete(engine_state).where(engine_state.c.name.in_(names)))
