"""Every supported Python here saves and loads a checkpoint, the oldest patch of each version first.

Enums pickle in another way before Python 3.11.4, so no checkpoint was ever saved there. No
interpreter is downloaded: install more, such as the oldest patch of each version, to test them too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from tests.house.wheels import build_wheel

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

_NAMES = tuple(f"python3.{minor}" for minor in range(11, 16))
_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


@cache
def _interpreters() -> dict[tuple[int, ...], Path]:
    """Return by version the supported interpreters on PATH and those of pyenv."""
    directories = [*map(Path, os.get_exec_path()), *_PYENV.glob("3.*/bin"), Path("/usr/bin")]
    found: dict[tuple[int, ...], Path] = {}
    for path in (directory / name for directory in directories for name in _NAMES):
        if not os.access(path, os.X_OK):
            continue
        done = subprocess.run([path, "-VV"], capture_output=True, text=True, check=False)
        version = re.match(r"Python (\d+)\.(\d+)\.(\d+) ", done.stdout)
        if version:
            found.setdefault(tuple(map(int, version.groups())), path)
    return dict(sorted(found.items()))


def _versions() -> list[str]:
    """Return the oldest patch of each minor version that is on this machine."""
    oldest: dict[tuple[int, ...], tuple[int, ...]] = {}
    for version in _interpreters():
        oldest.setdefault(version[:2], version)
    return [".".join(map(str, version)) for version in oldest.values()]


def test_this_interpreter_is_found():
    assert sys.version_info[:2] in {version[:2] for version in _interpreters()}


@pytest.mark.parametrize("version", _versions())
def test_a_checkpoint_is_saved_and_loaded(version: str, tmp_path: Path):
    interpreter = _interpreters()[tuple(map(int, version.split(".")))]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("VITALS_", "PYTHON"))}
    environ |= {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]:
        # The same packages: a minor version has one ABI.
        packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
        environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *packages])
    else:
        interpreter = _installed(interpreter, tmp_path)
    done = subprocess.run(
        [interpreter, "-m", "trainvitals", "doctor", "--format", "json"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout or "[]")}
    assert "ok" == checks["checkpoint"]["status"], done.stdout + done.stderr


def _installed(interpreter: Path, directory: Path) -> Path:
    """Return the Python of an environment with the wheel and torch; skip if none can be made."""
    environment = directory / "environment"
    made = subprocess.run(
        [interpreter, "-m", "venv", "--without-pip", environment], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"{interpreter} cannot make an environment: {made.stderr.decode()[-300:]}")
    python = environment / "bin" / "python"
    wheel = build_wheel(directory)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    done = subprocess.run(
        [*pip, str(wheel), "torch"], capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        shutil.rmtree(environment)
        pytest.skip(f"torch cannot be installed for {interpreter}: {done.stderr[-300:]}")
    return python
