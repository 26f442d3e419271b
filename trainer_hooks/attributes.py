"""What is written down about a run at its start: name, user, configuration, code."""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Mapping, Sequence

import torch

from trainvitals import __version__
from trainvitals.records import RunInfo

_SECRET_WORDS = ("token", "key", "secret", "password", "credential")
Plain = str | int | float | bool | None


def run_info(
    *,
    name: str,
    environ: Mapping[str, str],
    mode: str,
    config: Mapping[str, object],
    tags: Sequence[str],
    world_size: int,
    readback_lag: int,
    num_params: int,
    run_dir: str,
) -> RunInfo:
    """Return the run's attributes. Values of settings that sound like secrets are not kept."""
    return RunInfo(
        name=(name or environ.get("VITALS_NAME", ""))[:300],
        project=environ.get("VITALS_PROJECT", "")[:300],
        user=_user(),
        tags=tuple(tags),
        config=dict(flat(config)),
        git_commit=_git_commit(),
        mode=mode,
        world_size=world_size,
        readback_lag=readback_lag,
        num_params=num_params,
        torch_version=str(torch.__version__),
        vitals_version=__version__,
        run_dir=run_dir,
    )


def flat(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, Plain]]:
    """Return nested settings as dotted names with plain values; secrets become ``***``."""
    pairs: list[tuple[str, Plain]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs += flat(value, f"{name}.")
        elif any(word in str(key).lower() for word in _SECRET_WORDS) and isinstance(value, str):
            pairs.append((name, "***"))
        elif value is None or isinstance(value, str | int | float | bool):
            pairs.append((name, value))
        else:
            pairs.append((name, repr(value)[:500]))
    return pairs


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user id may have no name
        return ""


def _git_commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
