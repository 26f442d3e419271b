"""Says what runs take in the store, and what of them was thinned, by which rule."""

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, select

from trainvitals.views import RunVolume, ThinnedView
from vitals_collector.retention.rollup import VolumeSettings
from vitals_collector.retention.rollup_candidates import run_bytes
from vitals_collector.storage.schema import runs, thinned
from vitals_collector.storage.store import Store


@dataclass(frozen=True, slots=True)
class StoreSize:
    """What the whole database takes."""

    where: str
    num_bytes: int
    num_free: int
    """Bytes that new rows take before the database grows."""


def rule_of(stream: str, settings: VolumeSettings) -> str:
    """Return what is left of a stream's rows that were thinned, in words."""
    margin = settings.margin_steps
    if stream == "steps":
        return (
            f"ranks beside 0: the minimum, mean and maximum over ranks of each step, and the whole "
            f"rows of the {settings.num_worst_ranks} worst ranks of every {settings.window_steps} "
            f"steps; whole within {margin} steps of a decision or an acting finding"
        )
    if stream == "layers":
        return f"every {settings.layer_steps}th step; all within {margin} steps of a finding"
    return (
        f"the least and greatest values of every {settings.host_samples} samples; "
        f"all within {settings.margin_seconds:g} s of a decision or an acting finding"
    )


def volume_of(connection: Connection, run: Row[Any], settings: VolumeSettings) -> RunVolume:
    """Return what a run takes; measured now where no collector did so yet."""
    own = thinned.c
    query = select(thinned).where(own.run_id == run.run_id).order_by(own.stream, own.reason)
    return RunVolume(
        num_bytes=run.num_bytes or run_bytes(connection, run.run_id),
        max_bytes=settings.max_run_bytes,
        thinned=tuple(
            ThinnedView(
                stream=row.stream,
                reason=row.reason,
                num_rows=row.num_rows,
                num_bytes=row.num_bytes,
                to_step=row.to_step,
                to_unix_ns=row.to_unix_ns,
                rule=rule_of(row.stream, settings),
            )
            for row in connection.execute(query)
        ),
        is_pinned=run.pinned_unix_ns > 0,
    )


def measure(store: Store, settings: VolumeSettings) -> dict[str, RunVolume]:
    """Return what every run takes now, by id."""
    with store.read() as connection:
        rows = connection.execute(select(runs).order_by(runs.c.run_id.desc())).all()
        volumes = {}
        for row in rows:
            volume = volume_of(connection, row, settings)
            now = run_bytes(connection, row.run_id)
            volumes[row.run_id] = msgspec.structs.replace(volume, num_bytes=now)
    return volumes


def store_size(store: Store) -> StoreSize:
    """Return what the database takes on its disk."""
    with store.read() as connection:
        if connection.dialect.name == "sqlite":
            page, pages, free = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
                for name in ("page_size", "page_count", "freelist_count")
            )
            return StoreSize(store.where, page * pages, page * free)
        size = connection.execute(select(func.pg_database_size(func.current_database())))
        return StoreSize(store.where, int(size.scalar_one()), 0)


__all__ = ["StoreSize", "measure", "rule_of", "store_size", "volume_of"]
