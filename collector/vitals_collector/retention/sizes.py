"""Sizes of runs in the store, and the rows deleted from them, by rule."""

from typing import Any

import msgspec
from sqlalchemy import Row, select

from trainvitals.views import RunVolume, ThinnedView
from vitals_collector.numbers.interface import NumberStore
from vitals_collector.retention.rollup import LAYERS, window_size
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.storage.schema import runs
from vitals_collector.storage.store import Store


def remaining_rows_text(stream: str, settings: VolumeSettings) -> str:
    """Return a description of the remaining rows of a downsampled stream."""
    margin = settings.margin_steps
    if stream == "steps":
        return (
            f"ranks other than 0: minimum, mean and maximum over ranks for each step, and the full "
            f"rows of the {settings.num_worst_ranks} worst ranks of every {window_size(settings)} "
            f"steps; whole within {margin} steps of a decision or an acting finding"
        )
    if stream == LAYERS:
        return f"every {settings.layer_steps}th step; all within {margin} steps of a finding"
    return (
        f"the minimum and maximum values of every {settings.host_seconds} seconds; "
        f"all within {settings.margin_seconds:g} s of a decision or an acting finding"
    )


def volume_of(numbers: NumberStore, run: Row[Any], settings: VolumeSettings) -> RunVolume:
    """Return the size of a run at its last check, and the rows deleted from it."""
    return RunVolume(
        num_bytes=run.num_bytes or 0,
        max_bytes=settings.max_run_bytes,
        thinned=tuple(
            ThinnedView(**part._asdict(), rule=remaining_rows_text(part.stream, settings))
            for part in numbers.deleted_rows(run.run_id)
        ),
        is_pinned=run.pinned_unix_ns > 0,
    )


def measure_runs(store: Store, settings: VolumeSettings) -> dict[str, RunVolume]:
    """Return the current size of every run, by id."""
    with store.read_transaction() as connection:
        rows = connection.execute(select(runs).order_by(runs.c.run_id.desc())).all()
        volumes = {}
        for row in rows:
            volume = volume_of(store.numbers, row, settings)
            now = store.numbers.num_bytes(row.run_id)
            volumes[row.run_id] = msgspec.structs.replace(volume, num_bytes=now)
    return volumes
