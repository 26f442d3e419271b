"""Attributes of a run that are recorded at its start: name, user, configuration, code."""

from __future__ import annotations

import getpass
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import torch

from trainer_hooks.lifecycle.shutdown import is_interactive
from trainvitals import __version__
from trainvitals.policy import JudgeConfig
from trainvitals.records import RunInfo
from trainvitals.redaction import REDACTED, fields_of, is_secret, redact, redact_text

_MAX_TEXT = 500
_MAX_READ = 8_192
"""Characters read of a long text before it is cut, so that a secret at the cut is recognized."""
_MAX_DEPTH = 8
_MAX_CHARACTERS = 100_000
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
    judge: JudgeConfig,
    total_steps: int = 0,
    schedule: str = "",
    task: str = "",
) -> RunInfo:
    """Return the run's attributes at its start; secrets are removed by ``redaction``."""
    tag_list = [tags] if isinstance(tags, str) else tags
    return RunInfo(
        name=_attribute_text(name or environ.get("VITALS_NAME", ""))[:300],
        project=_attribute_text(environ.get("VITALS_PROJECT", ""))[:300],
        user=_user(),
        tags=tuple(_attribute_text(tag) for tag in tag_list),
        config=flatten_config(config),
        git_commit=_git_commit(),
        mode=mode,
        world_size=world_size,
        readback_lag=readback_lag,
        num_params=num_params,
        torch_version=str(torch.__version__),
        vitals_version=__version__,
        run_dir=run_dir,
        judge=msgspec.to_builtins(judge),
        total_steps=total_steps,
        schedule=_attribute_text(schedule),
        task=task,
    )


_timed: set[int] = set()
"""Pid of a process whose start was reported; only its first run started with the process."""


def process_started_unix_ns(now_unix_ns: int) -> int:
    """Return when this process started, for its first run's start; 0 if unrelated to the run.

    An interactive session started long before the run. Linux only.
    """
    started = 0
    if not is_interactive() and os.getpid() not in _timed:
        with suppress(OSError, ValueError, IndexError):  # another system
            with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - not a user path
                # Split behind the name, which may contain anything; field 22 is ticks since boot,
                # proc(5).
                ticks = int(file.read().rpartition(b")")[2].split()[19])
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
            started = now_unix_ns - max(0, int(age * 1e9))
    _timed.add(os.getpid())
    return started


def flatten_config(config: Mapping[str, object]) -> dict[str, Plain]:
    """Return nested settings as dotted names with plain values; secrets become ``***``.

    Bounded in depth, number and length: a record that is too large would be lost with the run's
    name.
    """
    flattened: dict[str, Plain] = {}
    num_characters = 0
    for name, value in _flatten_config(config, "", 0):
        num_characters += len(name) + len(str(value))
        if num_characters > _MAX_CHARACTERS:
            flattened["..."] = "more settings were left out"
            break
        flattened[name] = value
    return flattened


def _flatten_config(config: object, prefix: str, depth: int) -> Iterator[tuple[str, Plain]]:
    """Yield the settings of a starting run as dotted names and plain values."""
    for key, value in fields_of(config) or ():
        name = _attribute_text(f"{prefix}{key}")
        if is_secret(key, value):
            yield name, REDACTED
        elif depth < _MAX_DEPTH and fields_of(value) is not None:
            yield from _flatten_config(value, f"{name}.", depth + 1)
        elif value is None or isinstance(value, bool):
            yield name, value
        elif isinstance(value, float):  # including NumPy's float64
            yield name, float(value)
        elif isinstance(value, int) and abs(value) < 2**63:
            yield name, int(value)
        else:
            yield name, _attribute_text(value)


def _attribute_text(value: object) -> str:
    """Return a storable text for any object among the attributes of a starting run."""
    try:
        text = value if isinstance(value, str) else repr(redact(value))
    except Exception as error:  # noqa: BLE001 - a third-party __repr__ may raise anything
        text = f"<{type(value).__name__}: {type(error).__name__}>"
    text = redact_text(text[:_MAX_READ])
    return text[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode()


def _user() -> str:
    """Return the user's name, for the attributes of a starting run; empty without one."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user id of a container may have no name
        return ""


def _git_commit() -> str:
    """Return git's current commit, for the attributes of a starting run; empty if unknown."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
