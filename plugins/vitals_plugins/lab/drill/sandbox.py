"""Starts the training of a drill such that the user's files, runs and trackers stay unchanged.

Not restricted: the network, and reading. Without mount namespaces also file modes, times, extended
attributes, and shared memory of other programs (``find_gaps``).
"""

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from trainvitals.errors import UsageError
from trainvitals.io.setting_paths import with_absolute_paths
from trainvitals.policy.judge import SECTIONS
from vitals_plugins.lab.drill import landlock
from vitals_plugins.lab.drill.copying import mirror_cache

_PROBE_SECONDS = 60.0
_SHARED = tuple(Path(name) for name in ("/tmp", "/var/tmp", "/dev", "/dev/shm", "/run"))

_KEPT_PREFIXES = tuple(f"VITALS_{section.upper()}_" for section in SECTIONS)
_KEPT = frozenset(
    {
        *("VITALS_MODE", "VITALS_CONFIG", "VITALS_QUIET"),
        *("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_NAME", "WANDB_DISABLED", "WANDB_WATCH"),
        *("WANDB_TAGS", "WANDB_SILENT", "WANDB_CONSOLE", "WANDB_JOB_TYPE", "WANDB_RUN_GROUP"),
        *("MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS", "TRACKIO_PROJECT_NAME"),
        *("COMET_PROJECT_NAME", "COMET_WORKSPACE", "NEPTUNE_PROJECT", "SWANLAB_PROJECT"),
    }
)
_REMOVED_PREFIXES = (
    *("VITALS_", "WANDB_", "MLFLOW_", "DATABRICKS_", "AZUREML_", "TRACKIO_", "COMET_"),
    *("NEPTUNE_", "AIM_", "__AIM_", "CLEARML_", "TRAINS_", "SWANLAB_", "DVC_", "DVCLIVE_"),
    *("OTEL_EXPORTER_", "TENSORBOARD_LOGGING_DIR"),
)
_REMOVED = frozenset(
    {
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_TOKEN_PATH"),
        *("SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "XDG_RUNTIME_DIR"),
        *("NOTIFY_SOCKET", "DISPLAY", "WAYLAND_DISPLAY", "GITHUB_TOKEN", "GH_TOKEN", "OLDPWD"),
    }
)
"""Credentials, and sockets of programs that can change files for a client."""
_CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE"),
    *("HF_XET_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "KERAS_HOME"),
)
"""Caches that users move; without these variables the programs use ``XDG_CACHE_HOME``."""


class _Probe(msgspec.Struct, frozen=True):
    """Result of a sandbox that was set in a process of its own."""

    abi: int = 0
    without_mounts: str = ""
    leak: bool = False
    error: str = ""


def unavailable_reason() -> str | None:
    """Return why programs cannot be confined on this machine; None if they can.

    The sandbox is set in a process of its own, which then tries to write outside.
    """
    if sys.platform != "linux":
        return "Landlock needs Linux"
    abi = landlock.read_abi()
    if not abi:
        return "this kernel has no Landlock, or a container forbids it"
    if abi < landlock.MIN_ABI:
        return f"Landlock of this kernel (version {abi}) cannot deny truncation; use Linux 6.2"
    probe = _probe_sandbox()
    if probe.error:
        return probe.error
    return "a program in the sandbox could write outside" if probe.leak else None


def find_gaps() -> tuple[str, ...]:
    """Return sentences about changes that the sandbox on this machine does not deny."""
    gaps = ["The network is not blocked: a script that uploads files still does."]
    if _probe_sandbox().without_mounts:
        gaps.append(
            "Without mount namespaces, modes, owners, times and extended attributes of files "
            "outside can be changed, and files in /dev/shm."
        )
    return tuple(gaps)


@functools.cache
def _probe_sandbox() -> _Probe:
    """Set the sandbox in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="vitals-drill-") as name:
        directory = Path(name).resolve() / "inside"
        directory.mkdir()
        process = subprocess.run(
            sandboxed([], [directory]),
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    if process.returncode:
        return _Probe(error=process.stderr.strip() or f"it ended with {process.returncode}")
    return msgspec.json.decode(process.stdout, type=_Probe)


def sandboxed(
    command: Sequence[str], writable: Iterable[Path], *, protected: Iterable[Path] = ()
) -> list[str]:
    """Return the command that runs ``command`` confined to the directories.

    Start it with the copy as working directory, in a new session, with pipes or the null device as
    standard streams: open files and terminals are not restricted.

    Args:
        command: program and arguments.
        writable: existing directories, absolute and without links in their path. They should not
            be in ``/dev/shm``: without a writable directory there, the command gets its own.
        protected: directories that must stay unchanged, such as the user's project.

    Raises:
        UsageError: a directory is a link, is missing, or contains more than files of the drill.
    """
    forbidden = [Path.home(), Path(tempfile.gettempdir()), *_SHARED, *protected]
    paths = []
    for path in writable:
        if not path.is_dir() or path.resolve() != path:
            raise UsageError(f"{path} must be an existing directory, without links in its path")
        for directory in forbidden:
            if directory.resolve().is_relative_to(path):
                raise UsageError(
                    f"{path} must not be writable in a drill: it contains {directory}",
                    hint="use a directory that was created for the drill",
                )
        paths.append(str(path))
    return [sys.executable, "-I", "-S", str(landlock.__file__), json.dumps(paths), *command]


def offline_environ(environ: Mapping[str, str], copy: Path, private: Path) -> dict[str, str]:
    """Return the environment of a training in a drill.

    Trackers are offline or write below ``private``. Identifiers and credentials of real runs, and
    collectors, are removed. Temporary files, caches and Vitals' own files are below ``private``;
    cached models and data sets are linked there.

    Args:
        environ: usually ``os.environ``.
        copy: working directory of the training.
        private: directory of the drill, writable in the sandbox; a short path, because sockets are
            created below it.
    """
    result = {
        name: value
        for name, value in with_absolute_paths(environ).items()
        if name not in _REMOVED
        and (
            name in _KEPT
            or name.startswith(_KEPT_PREFIXES)
            or not name.startswith(_REMOVED_PREFIXES)
        )
    }
    names = ("tmp", "cache", "data", "state", "shm", "runs", "trackers")
    tmp, cache, data, state, shm, runs, trackers = (private / name for name in names)
    for directory in (tmp, data, state, shm, runs, trackers):
        directory.mkdir(mode=0o700, exist_ok=True)
    home_cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache")
    _mirror_once(home_cache, cache)
    for name in _CACHES:
        if environ.get(name):
            _mirror_once(Path(environ[name]).expanduser(), cache / f"drill-{name.lower()}")
            result[name] = str(cache / f"drill-{name.lower()}")
    result |= dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(tmp))
    result |= {
        "PWD": str(copy),
        "VITALS_DIR": str(runs),
        "VITALS_SHM": str(shm),
        "XDG_CACHE_HOME": str(cache),
        "XDG_DATA_HOME": str(data),  # the user's own collector is found there
        "XDG_STATE_HOME": str(state),
        "TRITON_HOME": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor"),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),
        "HF_TOKEN_PATH": str(private / "no-token"),
        "NETRC": str(private / "no-netrc"),  # wandb reads its key there
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(trackers),
        "WANDB_ARTIFACT_DIR": str(trackers / "artifacts"),
        "WANDB_CONFIG_DIR": str(trackers / "config"),
        "WANDB_DATA_DIR": str(trackers / "data"),
        "MLFLOW_TRACKING_URI": (trackers / "mlruns").as_uri(),
        "TENSORBOARD_LOGGING_DIR": str(trackers / "tensorboard"),
        "TRACKIO_DIR": str(trackers / "trackio"),
        "COMET_MODE": "OFFLINE",
        "COMET_START_ONLINE": "false",
        "COMET_OFFLINE_DIRECTORY": str(trackers / "comet"),
        "COMET_CONFIG": str(private / "no-comet"),
        "NEPTUNE_MODE": "offline",
        "NEPTUNE_DATA_DIRECTORY": str(trackers / "neptune"),
        "NEPTUNE_LOG_DIRECTORY": str(trackers / "neptune"),
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(trackers / "clearml"),
        "CLEARML_CONFIG_FILE": str(private / "no-clearml"),
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(trackers / "swanlab"),
        "OTEL_SDK_DISABLED": "true",
    }
    return result


def _mirror_once(source: Path, target: Path) -> None:
    """Create the directory, with links to the files of the cache if it exists."""
    if target.exists():
        return  # by an earlier training of this drill
    if source.is_dir():
        mirror_cache(source, target)
    else:
        target.mkdir(mode=0o700)
