"""One launch of two torchrun ranks for each framework: each variant and fault is a test of it."""

import importlib.util
import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # read at the import
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.declared import FRAMEWORKS, Framework
from tests.support.forked import TRAINING
from tests.trainer_hooks.measures.journal import Journal

WORLD = 2
PATIENCE_SECONDS = 280
GLOO_ABORT = "terminate called without an active exception"
"""What torch says now and then on a busy machine when a gloo rank exits, guarded or not."""


class Played:
    """What both ranks saw in one variant, and what the guard said of it."""

    def __init__(self, folder: Path, ranks: list[dict[str, Any]]) -> None:
        self.ranks = ranks
        self.journals = [Journal(folder / "shm", rank) for rank in range(WORLD)]


Play = Callable[[Framework, str], Played]


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Return what was seen of a framework's variant; its trainings run once."""

    @cache
    def launched(module: str) -> tuple[Path, list[Any]]:
        for attempt in range(3):
            folder = tmp_path_factory.mktemp(f"{module}{attempt}")
            code, output = launch(f"tests.integrations.trainings.{module}", folder)
            if code == 0:
                ranks = [json.loads((folder / f"{r}.json").read_text()) for r in range(WORLD)]
                return folder, ranks
            if GLOO_ABORT not in output:
                break
        raise AssertionError(f"torchrun exited with {code}:\n{output[-6000:]}")

    @cache
    def find(module: str, variant: str) -> Played:
        folder, ranks = launched(module)
        return Played(folder / variant.replace(" ", "-"), [rank[variant] for rank in ranks])

    return lambda framework, variant: find(framework.module, variant)


def launch(name: str, folder: Path) -> tuple[int, str]:
    """Run a framework's trainings on two ranks; return the exit code and what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD), "-m", "tests.integrations.rank", name, str(folder)]
    done = TRAINING.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


def is_installed(framework: Framework) -> bool:
    """Return whether the framework can be trained with here."""
    return not framework.package or importlib.util.find_spec(framework.package) is not None


def every_variant() -> list[tuple[Framework, str]]:
    """Return every framework that is installed with each of its variants."""
    return [(f, name) for f in FRAMEWORKS if is_installed(f) for name in f.variants]
