"""The user of a drill: a project with trackers and a home, and what a drill changes or leaves."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from vitals_bench.drill.loop import FOLDER

MARK = "BENCH_DRILL_MARK"
"""Variable by which processes of a drill are found, wherever their parents are."""
_FILES: Mapping[str, str] = {
    "project/README.md": "A project.",
    "project/.git/HEAD": "ref: refs/heads/main",
    "project/out/ckpt.pt": "the checkpoint of weeks",
    "project/out/checkpoint-9/trainer_state.json": "{}",
    "project/wandb/run-20240101_000000-abcdefgh/run-abcdefgh.wandb": "a run",
    "project/wandb/latest-run": "run-20240101_000000-abcdefgh",
    "project/mlruns/0/meta.yaml": "artifact_location: mlruns/0",
    "project/runs/Jan01_00-00-00_host/events.out.tfevents.1.host": "curves",
    "project/vitals_runs/01JD00000000000000000000QA/run.json": "{}",
    "home/.netrc": "machine api.wandb.ai login user password secret",
    "home/.config/wandb/settings": "[default]",
    "home/.cache/huggingface/token": "secret",
    "home/.cache/torch/hub/checkpoints/weights.pt": "weights",
    "home/.local/share/trainvitals/collector.json": "{}",
}
"""Files that a drill must not change; some of these names are written by the loops."""
_LARGE_BYTES = 17 << 20
"""A data file of this size is linked into the copy, not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserPlace:
    """Directories of a user who drills a loop."""

    root: Path
    environ: Mapping[str, str]

    @property
    def project(self) -> Path:
        """Directory in which the drill is started."""
        return self.root / "project"

    def fingerprint(self) -> dict[str, tuple[object, ...]]:
        """Return content, mode and times of everything of the user."""
        return {
            str(path.relative_to(self.root)): _facts(path)
            for name in ("project", "home")
            for path in [self.root / name, *sorted((self.root / name).rglob("*"))]
        }

    def leftovers(self) -> list[str]:
        """Return processes of the drill that still run, and its temporary files."""
        names = [f"tmp/{path.name}" for path in sorted((self.root / "tmp").iterdir())]
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.environ[MARK]:
                    names.append(f"process {process.pid}: {' '.join(process.cmdline())}")
            except psutil.Error:
                continue  # it has ended, or belongs to another user
        return names


@contextmanager
def user_place(script: str) -> Iterator[UserPlace]:
    """Create a user's directories with one script; delete them at the end."""
    with tempfile.TemporaryDirectory(prefix="bd-") as name:  # short: sockets are below it
        root = Path(name).resolve()
        for file, text in _FILES.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "tmp").mkdir()
        (root / "project" / "data").mkdir()
        (root / "project" / "data" / "tokens.bin").write_bytes(b"\1" * _LARGE_BYTES)
        shutil.copy(FOLDER / f"{script}.py", root / "project")
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VITALS_", "XDG_", "WANDB_", "MLFLOW_", "HF_"))
        }
        environ |= {
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "OMP_NUM_THREADS": "1",
            # As in a shell from which a real run was started.
            "WANDB_RUN_ID": "abcdefgh",
            "WANDB_API_KEY": "secret",
            "VITALS_RUN_ID": "01JD00000000000000000000QA",
            MARK: secrets.token_hex(8),
        }
        yield UserPlace(root=root, environ=environ)


def _facts(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    content = ""
    if stat.S_ISREG(status.st_mode):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    elif stat.S_ISLNK(status.st_mode):
        content = str(path.readlink())
    return status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content
