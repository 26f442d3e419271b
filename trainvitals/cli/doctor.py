"""`vitals doctor`: checks this machine, and reports problems with their fixes."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from trainvitals import __version__
from trainvitals.cli.programs import PACKAGES, install
from trainvitals.errors import UsageError, VitalsError
from trainvitals.plugins import load_plugin

Status = Literal["ok", "info", "note", "fail"]
"""``info``: something optional is not installed. ``note``: a problem that training survives."""

TRIALS = "trainvitals.trials"
"""Entry points that are called with an empty directory, and raise if training here would fail."""

MIN_SHARED_BYTES = 64 << 20
"""Minimum free shared memory without a note: Docker's default is 64 MB in total, and DataLoader
workers need most of it."""


MIN_DISK_BYTES = 16 << 20
"""Below this free space for run directories, the disk counts as full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check, with the fix if it failed."""

    name: str
    status: Status
    text: str
    hint: str = ""


def check_versions() -> Iterator[Check]:
    """Yield the versions of Vitals, Python and the system, for ``vitals doctor``."""
    yield Check(
        name="vitals",
        status="ok",
        text=f"{__version__} on Python {platform.python_version()}, {platform.system()}",
    )
    if sys.platform not in ("linux", "darwin"):
        yield Check(
            name="system",
            status="fail",
            text=f"{platform.system()} is not supported",
            hint="train on Linux; on macOS the hooks, the file journal and the demo work",
        )


def check_torch(installed: Callable[[str], str | None]) -> Check:
    """Return whether Vitals supports the installed torch; without torch, runs can only be read."""
    version = installed("torch")
    if version is None:
        return Check(
            name="torch",
            status="info",
            text=f"not installed; to train here, your own build or: {install('torch')}",
        )
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 6):
        return Check(
            name="torch",
            status="fail",
            text=f"{version} is too old; 2.6 or newer is needed",
            hint="older ones run code from checkpoints they load: pip install 'torch>=2.6'",
        )
    return Check(name="torch", status="ok", text=version)


def check_programs(importable: Callable[[str], bool]) -> Iterator[Check]:
    """Check whether base install and extras are complete, as ``vitals doctor`` shows them."""
    for extra, modules in PACKAGES.items():
        missing = [module for module in modules if not importable(module)]
        if not missing:
            yield Check(name=extra, status="ok", text="installed")
        elif extra != "base" and len(missing) == len(modules):
            yield Check(name=extra, status="info", text=f"not installed: {install(extra)}")
        else:
            text = f"incomplete: {', '.join(missing)} not installed"
            yield Check(name=extra, status="note", text=text, hint=install(extra))


def check_checkpoint(trials: Iterable[EntryPoint]) -> Iterator[Check]:
    """Check on behalf of ``vitals doctor`` that a checkpoint can be saved and loaded here."""
    for trial in trials:
        with tempfile.TemporaryDirectory(prefix="vitals-doctor-") as directory:
            try:
                trial.load()(Path(directory))
            except Exception as error:  # noqa: BLE001 - of whatever a broken torch raises
                text = error.text if isinstance(error, VitalsError) else f"{error!r}"
                yield Check(
                    name=trial.name,
                    status="fail",
                    text=f"a trial checkpoint cannot be saved and loaded: {text}",
                    hint="train with another Python or torch; without checkpoints nothing can be "
                    "rolled back",
                )
            else:
                yield Check(name=trial.name, status="ok", text="saved and loaded one as a trial")


def check_memory(environ: Mapping[str, str]) -> Iterator[Check]:
    """Check for ``vitals doctor`` that journals here are private, in memory, and have space."""
    from trainvitals.io.private import is_memory_backed, private_bases

    refused: list[VitalsError] = []
    base = next(private_bases(environ, refused), None)
    for error in refused:
        yield Check(name="private base", status="fail", text=error.text, hint=error.hint)
    if base is None:
        return
    yield Check(name="private base", status="ok", text=f"{base}, mode 0700, owned by this user")
    free = shutil.disk_usage(base).free
    if not is_memory_backed(base):
        yield Check(
            name="shared memory",
            status="note",
            text=f"{base} is on a disk, which takes metrics more slowly than memory does",
            hint="mount a tmpfs, and point VITALS_SHM at it",
        )
    elif free < MIN_SHARED_BYTES:
        yield Check(
            name="shared memory",
            status="fail",
            text=f"{free / 1e6:.0f} MB free in {base}, shared by Vitals and DataLoader workers; "
            f"{MIN_SHARED_BYTES / 1e6:.0f} MB are needed",
            hint="docker run --shm-size=1g, or an emptyDir with medium Memory in Kubernetes",
        )
    else:
        yield Check(name="shared memory", status="ok", text=f"{free / 1e6:.0f} MB free in {base}")


def check_run_directory(environ: Mapping[str, str]) -> Check:
    """Check for ``vitals doctor`` that run directories can be created in `VITALS_DIR`."""
    directory = Path(environ.get("VITALS_DIR") or "vitals_runs").absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        status = os.statvfs(existing)
        free = status.f_bavail * status.f_frsize
        if free < MIN_DISK_BYTES:
            return Check(
                name="run directories",
                status="note",
                text=f"{directory}: its disk has only {free >> 20} MB left; once it is full, the "
                "agent holds in memory what the ranks write",
                hint="free some space, or point VITALS_DIR at another disk",
            )
        return Check(name="run directories", status="ok", text=str(directory))
    return Check(
        name="run directories",
        status="fail",
        text=f"{directory} cannot be written: {existing} is not a folder that you may write to",
        hint="point VITALS_DIR at a directory you may write to",
    )


def examine(environ: Mapping[str, str]) -> list[Check]:
    """Run the checks of ``vitals doctor`` and return them in display order."""
    torch = check_torch(_installed_version)
    return [
        *check_versions(),
        torch,
        *check_checkpoint(entry_points(group=TRIALS) if torch.status == "ok" else ()),
        *check_programs(lambda module: find_spec(module) is not None),
        *check_memory(environ),
        check_run_directory(environ),
        Check(name="speed", status="info", text="not measured here: vitals preflight"),
        Check(name="your loop", status="info", text="not tested here: vitals drill"),
    ]


def _installed_version(distribution: str) -> str | None:
    """Return the version of a package that ``vitals doctor`` checks; None if it is missing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def render(checks: list[Check]) -> str:
    """Return the checks of ``vitals doctor`` as text, each problem with its fix."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.text}")
        if check.hint:
            lines.append(f"{'':<{width + 8}}-> {check.hint}")
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    """Add `vitals doctor`."""

    @app.command(epilog="Example: vitals doctor --burn-in 60")
    def doctor(
        format: Annotated[
            Literal["table", "json"], typer.Option(help="How to print the checks.")
        ] = "table",
        burn_in: Annotated[
            int | None,
            typer.Option(
                metavar="SECONDS",
                min=1,
                max=86_400,
                help="Instead test each GPU, or without one each CPU core, on computations with "
                "known answers, for this long.",
            ),
        ] = None,
        yes: Annotated[
            bool, typer.Option("--yes", help="Burn in although a run trains here.")
        ] = False,
        gpu_check: Annotated[
            bool,
            typer.Option(
                "--gpu-check",
                help="Instead check the training hooks and the agent on each GPU, in at most ten "
                "minutes; writes gpu-check/gpu_check.json. Needs a clone of the repository.",
            ),
        ] = False,
    ) -> None:
        """Check this machine: versions, packages, a checkpoint, memory, where runs are written.

        ok and info need no action; note and fail name the fix. Exits 1 if a check fails.

        --burn-in is for a node that is suspected of silent corruption. It compares matrix
        products, memory patterns and sums over devices bit for bit. It runs at the lowest
        priority and uses at most a quarter of the free memory, at most 4 GiB of the host and of
        each GPU. Ctrl-C ends it and shows the results so far.

        For speed, links and clocks of all nodes of a job, use vitals preflight. To test the
        reaction to faults in your own loop, use vitals drill.
        """
        if gpu_check:
            raise typer.Exit(run_gpu_check(lambda module: find_spec(module) is not None))
        if burn_in is None:
            checks, is_interrupted = examine(os.environ), False
        else:
            checks, is_interrupted = _run_burn_in(burn_in, yes)
        as_json = json.dumps([asdict(check) for check in checks], indent=2)
        typer.echo(as_json if format == "json" else render(checks))
        if any(check.status == "fail" for check in checks):
            raise typer.Exit(1)
        if is_interrupted:
            raise typer.Exit(130)


def run_gpu_check(importable: Callable[[str], bool]) -> int:
    """Run ``vitals doctor --gpu-check`` in a subprocess; return its exit code.

    Raises:
        UsageError: the benchmarks or PyTorch are not installed.
    """
    if not importable("vitals_bench"):
        raise UsageError(
            "the GPU check is not part of the wheel",
            hint="clone the repository and run `make gpu-check`, or install the clone with "
            "pip install --no-deps --editable . next to your PyTorch",
        )
    if not importable("torch"):
        raise UsageError("the GPU check needs PyTorch", hint=install("torch"))
    return subprocess.run([sys.executable, "-m", "vitals_bench", "gpu"], check=False).returncode


def _run_burn_in(seconds: int, yes: bool) -> tuple[list[Check], bool]:
    """Run the burn-in of ``vitals doctor``; refuse while a run trains on this node."""
    burn_in = load_plugin("burn-in")
    runs = burn_in.running_here(os.environ)
    if runs and not yes:
        raise UsageError(
            f"{', '.join(runs)} trains on this node; a burn-in takes CPU, GPU and memory from it",
            hint="wait until it has ended, or add --yes",
        )
    return cast(tuple[list[Check], bool], burn_in.burn_in(seconds, os.environ))
