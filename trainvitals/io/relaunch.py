"""Finds the run of a training that its launcher restarted.

torchrun restarts its ranks (``--max-restarts``), Slurm requeues a job: neither passes on what the
first start generated. So rank 0 stores the run's id under a key that is equal for a restart and the
first start only: the launcher, the command line, and the index of the run within the process,
because one script may train several.

    VITALS_DIR/.launches-<uid>/<sha256 of the key>     holds the run id; each user's own, 0700
"""

import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainvitals.errors import VitalsError
from trainvitals.identity import check_run_id
from trainvitals.io.private import ensure_own_dir, read_own, replace_file

MAX_LAUNCHES = 2_000
_FOLDER = ".launches"
"""Location in earlier versions, shared by all users; still read."""


def earlier_run(base: Path, environ: Mapping[str, str], *, nth: int = 0) -> str | None:
    """Read from a private file the ``nth`` run of this launch's first start; None if this is it."""
    for key, is_restart in _list_launch_keys(environ, sys.argv, nth):
        for path in (
            (_launch_path(_user_directory(base), key), _launch_path(base / _FOLDER, key))
            if is_restart
            else ()
        ):
            try:
                return check_run_id(read_own(path).decode().strip())
            except FileNotFoundError:
                continue  # the other location may have it
            except (OSError, VitalsError, UnicodeDecodeError):
                return None
    return None


def remember_run(base: Path, environ: Mapping[str, str], run_id: str, *, nth: int = 0) -> None:
    """Write the id of this process's ``nth`` run to a file, for the restarts of this launch.

    The oldest of more than this many launches are deleted.

    Raises:
        OSError: it cannot be written; a restart would then start a new run.
        InsecurePathError: another user has a directory with that name; likewise.
    """
    for key, _ in _list_launch_keys(environ, sys.argv, nth):
        base.mkdir(parents=True, exist_ok=True)
        folder = ensure_own_dir(_user_directory(base), read=0)
        replace_file(_launch_path(folder, key), run_id.encode() + b"\n", mode=0o600)
        _forget_oldest(folder)


def _forget_oldest(folder: Path) -> None:
    """Delete the oldest files of launches, if there are too many."""
    names = os.listdir(folder)  # noqa: PTH208 - mostly only their number is wanted
    if len(names) <= MAX_LAUNCHES:
        return
    ages = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another job's start removes them as well
            ages.append(((folder / name).stat().st_mtime_ns, name))
    for _, name in sorted(ages)[: len(ages) - MAX_LAUNCHES // 2]:
        (folder / name).unlink(missing_ok=True)


def _list_launch_keys(
    environ: Mapping[str, str], argv: Sequence[str], nth: int
) -> list[tuple[str, bool]]:
    """Return the keys of this launch's files: each with whether it proves a restart."""
    command = "\0".join([*argv, str(nth)])
    launches = []
    torchrun, again = environ.get("TORCHELASTIC_RUN_ID"), environ.get("TORCHELASTIC_RESTART_COUNT")
    if torchrun is not None and again is not None:
        # The agent outlives its ranks; its process distinguishes two launches with one --rdzv-id.
        agent = f"{socket.gethostname()}:{os.getppid()}:{_started(os.getppid())}"
        launches.append((f"torchrun\0{torchrun}\0{agent}\0{command}", again != "0"))
    job = environ.get("SLURM_JOB_ID")
    if job is not None:
        cluster, step = environ.get("SLURM_CLUSTER_NAME", ""), environ.get("SLURM_STEP_ID", "")
        restarted = environ.get("SLURM_RESTART_COUNT", "0") != "0" or again not in (None, "0")
        task = _own_task(environ)
        launches.append((f"slurm\0{cluster}\0{job}\0{step}\0{task}\0{command}", restarted))
    return launches


def _own_task(environ: Mapping[str, str]) -> str:
    """Return the task's number for the key of a launch file, if each task trains on its own.

    A training over all tasks must not depend on which of them holds rank 0: that may change.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    together = environ.get("GROUP_WORLD_SIZE") or environ.get("WORLD_SIZE") or "1"
    return environ.get("SLURM_PROCID", "") if together == "1" != tasks else ""


def _user_directory(base: Path) -> Path:
    """Return the private directory with the run ids of this user's launches."""
    return base / f"{_FOLDER}-{os.geteuid()}"


def _launch_path(folder: Path, key: str) -> Path:
    """Return the path of the file that holds the run id of a launch."""
    return folder / hashlib.sha256(key.encode()).hexdigest()


def _started(pid: int) -> str:
    """Return a launcher's start from its ``/proc`` file, in ticks since the boot; "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
