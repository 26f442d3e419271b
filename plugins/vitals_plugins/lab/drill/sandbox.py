"""Starts the training of a drill such that the user's files, runs and trackers stay unchanged.

Not restricted: reading, and the network; ``find_gaps`` returns what else is not.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainvitals.errors import UsageError
from trainvitals.io.setting_paths import with_absolute_paths
from trainvitals.policy.judge import SECTIONS
from vitals_plugins.lab.drill import landlock
from vitals_plugins.lab.drill.copying import mirror_cache

_PROBE_SECONDS = 60.0
_PROBE = """
touch "$1/file" && echo works
(echo >"$2/file") && echo leaks
chmod 0700 "$2" && echo changes-modes
"""
_SHARED = tuple(Path(name) for name in ("/tmp", "/var/tmp", "/dev", "/run"))

_REMOVED_PREFIXES = (
    *("VITALS_", "WANDB_", "MLFLOW_", "DATABRICKS_", "AZUREML_", "TRACKIO_", "COMET_"),
    *("NEPTUNE_", "AIM_", "__AIM_", "CLEARML_", "TRAINS_", "SWANLAB_", "DVC_", "OTEL_EXPORTER_"),
)
_KEPT_PREFIXES = tuple(f"VITALS_{section.upper()}_" for section in SECTIONS)
_KEPT = frozenset(
    {
        *("VITALS_MODE", "VITALS_CONFIG", "VITALS_QUIET", "WANDB_PROJECT", "WANDB_ENTITY"),
        *("WANDB_NAME", "WANDB_DISABLED", "WANDB_WATCH", "WANDB_TAGS", "WANDB_SILENT"),
        *("MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS", "COMET_PROJECT_NAME", "COMET_WORKSPACE"),
        *("NEPTUNE_PROJECT", "SWANLAB_PROJECT"),
    }
)
_REMOVED = frozenset(
    {
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "GITHUB_TOKEN"),
        *("GH_TOKEN", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "OLDPWD"),
        *("XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "DISPLAY", "WAYLAND_DISPLAY"),
    }
)
"""Credentials, and sockets of programs that change files for their clients."""
_CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE"),
    *("HF_XET_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "KERAS_HOME"),
)
"""Caches of downloads that users move; otherwise they are in ``XDG_CACHE_HOME``."""
_CONSTANTS = {
    "WANDB_MODE": "offline",
    "COMET_MODE": "OFFLINE",
    "COMET_START_ONLINE": "false",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
    "OTEL_SDK_DISABLED": "true",
}
_PLACES = {
    **dict.fromkeys(("TMPDIR", "TMP", "TEMP"), "tmp"),
    "VITALS_DIR": "runs",
    "VITALS_SHM": "shm",
    "XDG_CACHE_HOME": "cache",
    "XDG_DATA_HOME": "data",  # the user's own collector is found in the default one
    "XDG_STATE_HOME": "state",
    "TRITON_HOME": "cache",
    "TRITON_CACHE_DIR": "cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "cache/torchinductor",
    "TORCH_EXTENSIONS_DIR": "cache/torch_extensions",
    "CUDA_CACHE_PATH": "cache/cuda",
    "NUMBA_CACHE_DIR": "cache/numba",
    "MPLCONFIGDIR": "cache/matplotlib",
    "WANDB_DIR": "trackers",
    "WANDB_ARTIFACT_DIR": "trackers/artifacts",
    "WANDB_CONFIG_DIR": "trackers/config",
    "WANDB_DATA_DIR": "trackers/data",
    "TENSORBOARD_LOGGING_DIR": "trackers/tensorboard",
    "TRACKIO_DIR": "trackers/trackio",
    "COMET_OFFLINE_DIRECTORY": "trackers/comet",
    "NEPTUNE_DATA_DIRECTORY": "trackers/neptune",
    "NEPTUNE_LOG_DIRECTORY": "trackers/neptune",
    "CLEARML_CACHE_DIR": "trackers/clearml",
    "SWANLAB_LOG_DIR": "trackers/swanlab",
    # These do not exist: credentials are not found.
    "NETRC": "none/netrc",
    "HF_TOKEN_PATH": "none/token",
    "COMET_CONFIG": "none/comet",
    "CLEARML_CONFIG_FILE": "none/clearml",
}
"""Variables with a path below the drill's directory."""


def unavailable_reason() -> str | None:
    """Return why programs cannot be confined on this machine; None if they can."""
    if sys.platform != "linux":
        return "the sandbox needs Linux"
    attempts, errors = _probe_sandbox()
    if "works" not in attempts:
        return errors.strip() or "the sandbox does not start"
    return "a program in the sandbox could write outside" if "leaks" in attempts else None


def find_gaps() -> tuple[str, ...]:
    """Return sentences about changes that the sandbox on this machine does not deny."""
    network = (
        "Network and sockets are not blocked: a script that uploads files, or gives orders to a "
        "server such as Docker, still does so."
    )
    modes = (
        "This kernel allows no mount namespace: modes, owners, times and attributes of files "
        "outside can be changed, and the files in /dev/shm."
    )
    return (network,) if has_mount_namespace() else (network, modes)


def has_mount_namespace() -> bool:
    """Return whether the kernel allows the sandbox of a drill its own mounts."""
    attempts, _ = _probe_sandbox()
    return "works" in attempts and "changes-modes" not in attempts


@functools.cache
def _probe_sandbox() -> tuple[frozenset[str], str]:
    """Run a shell in the sandbox that tries to write; return what worked and its errors."""
    with tempfile.TemporaryDirectory(prefix="vitals-drill-") as name:
        inside, outside = Path(name).resolve() / "in", Path(name).resolve() / "out"
        inside.mkdir()
        outside.mkdir()
        command = ["sh", "-c", _PROBE, "sh", str(inside), str(outside)]
        try:
            process = subprocess.run(
                sandboxed(command, [inside]),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired, UsageError) as error:
            return frozenset(), str(error)
    return frozenset(process.stdout.split()), process.stderr


def sandboxed(
    command: Sequence[str],
    writable: Iterable[Path],
    *,
    protected: Iterable[Path] = (),
    small: tuple[Path, int] | None = None,
) -> list[str]:
    """Return the command that runs ``command`` confined to the directories.

    Start it in a new session, with the copy as working directory, and with pipes, new files or the
    null device as standard streams: terminals and files that are already open are not restricted.
    Between two of the directories, files cannot be renamed.

    Args:
        command: program and arguments.
        writable: existing directories, absolute, without links in their path.
        protected: directories that must stay unchanged, such as the project.
        small: directory below a writable one that becomes a disk in memory with this many bytes,
            if the kernel allows a mount namespace.

    Raises:
        UsageError: a directory is missing or a link, or has more in it than files of the drill.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - raises nothing for an unknown user
    forbidden = [home, Path(tempfile.gettempdir()), *_SHARED, *protected]
    paths = [str(path) for path in writable]
    for path in map(Path, paths):
        if not path.is_dir() or path.resolve() != path or path.is_relative_to("/dev"):
            raise UsageError(
                f"{path} must be an existing directory outside of /dev, without links in its path",
                hint="set TMPDIR to a directory on a disk",
            )
        for directory in forbidden:
            if directory.resolve().is_relative_to(path):
                raise UsageError(f"{path} must not be writable in a drill: it has {directory}")
    disk = None if small is None else (str(small[0]), small[1])
    options = json.dumps([paths, disk])
    return [sys.executable, "-I", "-S", str(landlock.__file__), options, *command]


def offline_environ(environ: Mapping[str, str], copy: Path, private: Path) -> dict[str, str]:
    """Return the environment of a training in a drill.

    Trackers are offline. Identifiers and credentials of real runs, and collectors, are removed.
    Temporary files, caches and files of Vitals are below ``private``, with links to what is cached.

    Args:
        environ: usually ``os.environ``.
        copy: working directory of the training.
        private: new directory, writable in the sandbox. Its path is short: sockets are below it.
    """
    result = {
        name: value
        for name, value in with_absolute_paths(environ).items()
        if name in _KEPT
        or name.startswith(_KEPT_PREFIXES)
        or not (name in _REMOVED or name.startswith(_REMOVED_PREFIXES))
    }
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/"), ".cache"))
    sources = {name: environ[name] for name in _CACHES if environ.get(name)}
    for name, source in {"XDG_CACHE_HOME": cache, **sources}.items():
        target = private / _PLACES.get(name, name)
        if Path(source).expanduser().is_dir():
            mirror_cache(Path(source).expanduser(), target)
        result[name] = str(target)
    for place in _PLACES.values():
        if not place.startswith("none/"):
            (private / place).mkdir(parents=True, exist_ok=True, mode=0o700)
    mlflow = (private / "trackers" / "mlruns").as_uri()
    places = {name: str(private / place) for name, place in _PLACES.items()}
    return {**result, **places, **_CONSTANTS, "PWD": str(copy), "MLFLOW_TRACKING_URI": mlflow}
