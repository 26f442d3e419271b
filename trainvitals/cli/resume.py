"""``vitals resume``: allows a run that Vitals halted to continue."""

from datetime import UTC, datetime
from pathlib import Path

import typer

from trainvitals.cli.options import LocalRun, VitalsDir
from trainvitals.errors import StorageError, UsageError, VitalsError
from trainvitals.io.rundir import HaltMarker, RunDir, is_run_id


def register(app: typer.Typer) -> None:
    """Add the ``resume`` command."""

    @app.command(epilog="Example: vitals resume my-run")
    def resume(run: LocalRun, directory: VitalsDir = Path("vitals_runs")) -> None:
        """Allow a halted run to start again; shows why it was stopped.

        Starts nothing and resets no budget: the next start continues with the budget that is left.
        """
        run_dir = find_halted(run, directory)
        marker = run_dir.halted()
        if marker is None:
            raise UsageError(
                f"run {run_dir.run_id} is not halted; there is nothing to resume",
                hint="`vitals show RUN` says how the run ended",
            )
        typer.echo(_halt_text(run_dir.run_id, marker))
        try:
            run_dir.clear_halted()
        except OSError as error:
            raise StorageError(
                f"{run_dir.path / 'HALTED'} cannot be removed: {error.strerror}",
                hint="you need write permission to the run directory to resume the run",
            ) from error
        typer.echo(f"the run may start again: set VITALS_RUN_ID={run_dir.run_id} for its training")


def find_halted(run: str, vitals_dir: Path) -> RunDir:
    """Return the run to ``vitals resume``; if several match, the only one that is halted.

    Args:
        run: a run directory, a directory with runs, or an id, the start of one, or a name.
        vitals_dir: where to look for an id or a name.

    Raises:
        UsageError: no run matches, or several do.
    """
    fitting = find_matching_runs(run, vitals_dir)
    halted = [run_dir for run_dir in fitting if _is_halted(run_dir)]
    if len(halted) == 1 or len(fitting) == 1:
        return (halted or fitting)[0]
    if not halted:
        raise UsageError(f"none of the {len(fitting)} matching runs is halted")
    ids = ", ".join(run_dir.run_id for run_dir in halted[:3])
    raise UsageError(
        f"{len(halted)} runs match and are halted: {ids}",
        hint="give the id of one",
    )


def find_matching_runs(run: str, vitals_dir: Path) -> list[RunDir]:
    """Return the runs that the argument of a ``vitals`` command matches, oldest first.

    Args:
        run: a run directory, a directory with runs, or an id, the start of one, or a name.
        vitals_dir: where to look for an id or a name.

    Raises:
        UsageError: no run matches.
    """
    folder = Path(run).expanduser()
    if is_run_id(folder.absolute().name) and run and folder.is_dir():
        return [RunDir.open(folder)]
    fitting, where = (RunDir.find_all(folder) if run else []), folder
    if not fitting:
        runs, where = RunDir.find_all(vitals_dir), vitals_dir
        fitting = [run_dir for run_dir in runs if run and run_dir.run_id.startswith(run.upper())]
        fitting = fitting or [run_dir for run_dir in runs if run and _run_name(run_dir) == run]
    if not fitting:
        raise UsageError(
            f"there is no run {run!r} in {where}",
            hint="give the run's folder, or --dir with the folder that holds it",
        )
    return fitting


def _is_halted(run_dir: RunDir) -> bool:
    """Return whether a run has a halt marker that ``vitals resume`` can read."""
    try:
        return run_dir.halted() is not None
    except PermissionError:
        return False  # another user's run, whose directory is not accessible


def _halt_text(run_id: str, marker: HaltMarker) -> str:
    """Return the line in which ``vitals resume`` shows when and why a run was halted."""
    when = ""
    if marker.time_unix_ns:
        moment = datetime.fromtimestamp(marker.time_unix_ns / 1e9, UTC)
        when = f" on {moment:%Y-%m-%d at %H:%M:%S} UTC"
    at = f" at step {marker.step}" if marker.step >= 0 else ""
    return f"run {run_id} was stopped{at}{when}: {marker.reason}"


def _run_name(run: RunDir) -> str:
    """Return a run's name, which ``vitals resume`` accepts as well; "" if it is unknown."""
    try:
        info = run.info()
    except (VitalsError, OSError):
        return ""
    return "" if info is None else info.name
