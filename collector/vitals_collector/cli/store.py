"""`vitals store`: sizes of runs, copies of the store, and runs to delete or keep.

These commands open the collector's database directly: any user who can read its data directory can
use them. The collector may be running, except for `compact`.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from trainvitals.cli.groups import Commands, add_group
from trainvitals.cli.options import Form
from trainvitals.cli.output import Format, write_table
from trainvitals.errors import StorageError, UsageError
from trainvitals.units import humanize_count

if TYPE_CHECKING:
    from vitals_collector.storage.store import Store

CapGigabytes = Annotated[
    float,
    typer.Option(
        help="Roll up a run early when it exceeds this many GB (1e9 bytes); 0: no cap.",
        envvar="VITALS_COLLECTOR_CAP_GB",
        min=0.0,
    ),
]
LostAfter = Annotated[
    float, typer.Option(help="Seconds without data after which a run counts as lost.", min=1.0)
]
Data = Annotated[
    Path | None,
    typer.Option(help="The collector's data folder [default: ~/.local/share/trainvitals]."),
]
Database = Annotated[
    str,
    typer.Option(
        help="postgresql://USER@HOST/DB, where the collector uses one.",
        envvar="VITALS_COLLECTOR_DATABASE",
    ),
]
Run = Annotated[str, typer.Argument(help="Run id or its beginning, or name.")]


class StoreChoice(msgspec.Struct, frozen=True):
    """Options that name a collector's store."""

    data: Data = None
    database: Database = ""

    @contextmanager
    def open(self, *, with_rows: bool = True) -> "Iterator[Store]":
        """Open the store that a command names; without its rows, the lake need not be opened."""
        from vitals_collector.storage.store import DATABASE_FILE, open_data_store, open_store

        where = data_dir(self.data)
        if not self.database and not (where / DATABASE_FILE).is_file():
            raise UsageError(
                f"there is no store in {where}",
                hint="start `vitals collector` once, or give its --data or --database",
            )
        if with_rows:
            store = open_data_store(where, self.database)
        else:
            store = open_store(self.database or f"sqlite:///{where / DATABASE_FILE}")
        with closing(store):
            yield store


def register(app: typer.Typer) -> None:
    """Add the ``vitals store`` commands."""
    commands: Commands = {
        "size": (size, "vitals store size --format json"),
        "check": (check, "vitals store check"),
        "backup": (copy, "vitals store backup /backup/vitals-monday"),
        "compact": (compact, "vitals store compact"),
        "delete": (delete, "vitals store delete 01JD00 --yes"),
        "pin": (pin, "vitals store pin 01JD00"),
    }
    about = "Manage the collector's store: sizes, backups, removal."
    add_group(app, "store", commands, about=about, example="vitals store size")


def size(
    *,
    choice: StoreChoice,
    cap_gb: CapGigabytes = 5.0,
    form: Form = Format.TABLE,
) -> None:
    """Show the size of every run, what was rolled up, and which runs are above the cap."""
    from vitals_collector.retention.checkup import store_size
    from vitals_collector.retention.settings import VolumeSettings
    from vitals_collector.retention.sizes import measure_runs

    with choice.open() as store:
        volumes = measure_runs(store, VolumeSettings(max_run_bytes=round(cap_gb * 1e9)))
        whole = store_size(store)
        names = _run_names(store)
    rows = [
        (
            run_id,
            names[run_id],
            volume.num_bytes,
            "above" if 0 < volume.max_bytes < volume.num_bytes else "",
            "yes" if volume.is_pinned else "",
            sum(thinning.num_rows for thinning in volume.thinned),
            max(
                (thinning.to_step for thinning in volume.thinned if thinning.stream == "steps"),
                default=None,
            ),
        )
        for run_id, volume in volumes.items()
    ]
    header = ("run", "name", "bytes", "cap", "pinned", "thinned rows", "thinned to step")
    write_table(header, rows, form, body={"store": whole, "runs": volumes})
    if form is Format.JSON:
        return
    typer.echo(f"{whole.where}: {whole.num_bytes} bytes, {whole.num_free} of them free", err=True)


def check(*, choice: StoreChoice, form: Form = Format.TABLE) -> None:
    """Verify the checksums of all rows and records; exits 1 if some are damaged.

    Queries leave out damaged rows. The collector removes damaged files from the store, and agents
    resend the rows that they still have.
    """
    from vitals_collector.retention.checkup import DamagedPart
    from vitals_collector.retention.checkup import check_store as check_all

    with choice.open() as store:
        damaged = check_all(store)
    rows = [(each.what, each.num_rows, " ".join(each.run_ids)) for each in damaged]
    header = tuple(name.replace("_", " ") for name in DamagedPart._fields)
    write_table(header, rows, form, body={"damaged": [each._asdict() for each in damaged]})
    typer.echo(f"everything was read; damaged: {len(damaged)}", err=True)
    if damaged:
        raise typer.Exit(1)


def copy(
    *,
    folder: Annotated[
        Path, typer.Argument(help="The copy's name; the folder that it is made in must exist.")
    ],
    choice: StoreChoice,
) -> None:
    """Write a consistent copy of the store to a new folder; the collector may keep running.

    The copy is a data directory: `vitals collector --data COPY` runs on it. Copy it to another disk
    first (`cp -a`), because it may share the files of rows with the store. Agents resend later rows
    for a day (`vitals agent --retain-hours`). For PostgreSQL run
    pg_dump --format=custom --file=FILE "$VITALS_COLLECTOR_DATABASE", then copy the directory of the
    rows. Rows on S3 stay there: let the bucket keep versions.
    """
    from vitals_collector.retention.backup import backup

    if choice.database:
        raise UsageError(
            "back up a PostgreSQL database with pg_dump instead of this command",
            hint='pg_dump --format=custom --file=FILE "$VITALS_COLLECTOR_DATABASE", then copy the '
            "folder of the rows; restore with pg_restore --dbname=URL FILE",
        )
    result = backup(data_dir(choice.data), folder)
    typer.echo(
        f"{result.folder}: {result.num_bytes} bytes, tables of version {result.version}", err=True
    )


def compact(*, choice: StoreChoice, cap_gb: CapGigabytes = 5.0) -> None:
    """Merge and roll up everything now, and free disk space. Stop the collector first."""
    from trainvitals.clock import SystemClock
    from vitals_collector.api.serve import lock_data_dir
    from vitals_collector.retention.checkup import store_size
    from vitals_collector.retention.maintenance import LakeMaintenance
    from vitals_collector.retention.settings import VolumeSettings

    with lock_data_dir(data_dir(choice.data)), choice.open() as store:
        before = store_size(store)
        settings = VolumeSettings(max_run_bytes=round(cap_gb * 1e9))
        num_rows = LakeMaintenance(store, settings, clock=SystemClock(), pause=0.0).run_all()
        after = store_size(store)
    typer.echo(
        f"{humanize_count(num_rows, 'row')} thinned; {before.num_bytes} bytes before, "
        f"{after.num_bytes} now",
        err=True,
    )


def delete(
    *,
    run: Run,
    choice: StoreChoice,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    lost_after: LostAfter = 60.0,
) -> None:
    """Delete an ended run permanently, including rows that agents still send."""
    import time

    from vitals_collector.live.run_status import Liveness
    from vitals_collector.retention import removal

    with choice.open() as store:
        run_id = find_run(store, run)
        if not yes:
            name = _run_names(store)[run_id]
            typer.confirm(f"Permanently remove run {run_id} ({name or 'no name'})?", abort=True)
        when = Liveness(now_unix_ns=time.time_ns(), lost_after_seconds=lost_after)
        with _disk_space_hint():
            deleted = removal.delete_run(store, run_id, by=user(), when=when)
    typer.echo(
        f"run {deleted.run_id} removed: {deleted.num_bytes} bytes, which the collector gives back "
        "within 10 minutes (`vitals store compact` at once)",
        err=True,
    )


def pin(
    *,
    run: Run,
    choice: StoreChoice,
    off: Annotated[bool, typer.Option("--off", help="Unpin: remove it by age again.")] = False,
) -> None:
    """Keep a run regardless of age, like the tag `keep`."""
    import time

    from vitals_collector.retention.removal import pin

    with choice.open() as store:
        run_id = find_run(store, run)
        pin(store, run_id, by=user(), now_unix_ns=time.time_ns(), is_kept=not off)
    typer.echo(f"run {run_id} is {'no longer ' if off else ''}kept indefinitely", err=True)


@contextmanager
def _disk_space_hint() -> Iterator[None]:
    """Add a hint to `vitals store`'s error if the disk is too full even to delete the run."""
    from vitals_collector.numbers.interface import FULL

    try:
        yield
    except StorageError as error:
        if error.code != FULL:
            raise
        raise StorageError(
            error.text,
            hint="deleting needs a few MB of free space for the journal: free some space and run "
            "the command again; finished deletions stay in effect",
            code=FULL,
        ) from error


def data_dir(data: Path | None) -> Path:
    """Return the collector's data directory for a command: the given one, or the default.

    ``VITALS_COLLECTOR_URL`` may name it, as for commands that query a collector.

    Raises:
        UsageError: it is the URL of another collector, whose directory is unknown.
    """
    from trainvitals.io.client import read_collector_file
    from trainvitals.io.setting_paths import collector_folder, default_data_dir

    if data is not None:
        return data.expanduser().absolute()
    named = os.environ.get("VITALS_COLLECTOR_URL", "")
    if (folder := collector_folder(named)) is not None:
        return folder
    usual = default_data_dir(os.environ).absolute()
    collector_file = read_collector_file(usual) if named else None
    if named and (collector_file is None or collector_file.url not in named.split(",")):
        raise UsageError(
            f"VITALS_COLLECTOR_URL is {named}, whose data folder is not {usual}; this command "
            "reads the folder",
            hint="run it on the collector's machine with --data DIR, or unset the variable",
        )
    return usual


def _run_names(store: "Store") -> dict[str, str]:
    """Return the names of all stored runs by id, for ``vitals store``."""
    from sqlalchemy import select

    from vitals_collector.storage.schema import runs

    with store.read_transaction() as connection:
        rows = connection.execute(select(runs.c.run_id, runs.c.name)).all()
    return {row.run_id: row.name for row in rows}


def find_run(store: "Store", id_or_name: str) -> str:
    """Return the stored run that a command names: the only one with that id, its start, or name."""
    from vitals_collector.storage.store import UNKNOWN

    names = _run_names(store)
    by_id = [run_id for run_id in names if run_id.startswith(id_or_name.upper())]
    matches = by_id or [run_id for run_id, name in names.items() if name == id_or_name]
    if len(matches) != 1 or not id_or_name:
        raise UsageError(
            f"{id_or_name!r} matches {len(matches)} runs; it must match one",
            hint="`vitals runs` lists ids and names",
            code=UNKNOWN,
        )
    return matches[0]


def user() -> str:
    """Return the user who runs this command, for the audit log."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"
