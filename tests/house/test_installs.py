"""Every command in an environment made of the wheel alone: the base, and each extra by itself.

The packages are those that pip takes today. An import of a package that no requirement names shows
here as soon as the package that used to bring it no longer does.
"""

import json
import os
import re
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

import pytest

from tests.house.wheels import build_wheel
from trainvitals.cli.programs import COMMANDS, PACKAGES

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

EXTRAS = (
    *("collector", "notify", "remote-write", "postgresql", "s3", "dashboard", "oidc", "grafana"),
    *("replay", "tensorboard", "trackio", "otlp", "mcp"),
)
"""Those that bring no framework: these are installed by `make test-integrations`."""

LOG = "step,loss,grad_norm\n" + "".join(f"{step},{2.0 / (step + 1)},1.0\n" for step in range(600))

WORDS = {
    "demo": ["--headless"],
    "up": ["--dir", "log.csv"],  # a file: with a folder it serves until it is stopped
    "run": ["--", "true"],
    "doctor": [],
    "resume": ["runs"],
    "plan": ["--params", "7e9", "--tokens", "1e12", "--gpus", "64", "--gpu", "h100"],
    "preflight": ["--failed-nodes"],
    "drill": ["--budget", "60", "--", "true"],
    "agent": ["--dir", "runs", "--once"],
    "repro": ["runs", "3", "--entry", "train.py:build"],
    "landscape": ["runs", "--entry", "train.py:build"],
    "collector": ["--folder", "absent"],
    "runs": ["runs"],
    "show": ["runs"],
    "why": ["runs", "3"],
    "tail": ["runs"],
    "query": ["steps", "runs"],
    "postmortem": ["runs"],
    "goodput": ["runs"],
    "forecast": ["runs"],
    "replay": ["log.csv"],
    "alerts": ["test", "--receivers", "receivers.toml"],
    "command": ["runs", "halt", "--reason", "test"],
    "stacks": ["runs"],
    "store": ["size", "--data", "data"],
    "export": ["runs"],
    "sql": ["FROM runs", "--data", "data"],
    "token": ["list", "--data", "data"],
    "mirror": ["absent", "--to", "nowhere"],  # with a tracker it waits for the run
    "mcp": ["runs"],  # stdin is empty
    "confirm": ["3f2a9c0d11e4"],  # stdin is no terminal
    "skill": ["install"],
    "audit": ["log.csv"],
    "dashboard": ["absent"],
    "checkpoints": ["list", "runs"],
    "deploy": ["all", "--output", "deployed"],
}
"""Arguments with which each command ends by itself; most find nothing, and say so."""

NEEDS = re.compile(r"needs the package (\S+), which is not installed")
HINT = re.compile(r"pip install '?trainvitals(?:\[([a-z0-9,-]+)\])?'?")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def install(wheel, tmp_path_factory):
    @cache
    def installed(extra: str) -> Path:
        home = tmp_path_factory.mktemp(extra or "base")
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wanted],
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        return python

    return installed


@pytest.fixture
def place(tmp_path) -> Path:
    for name in ("runs", "shm", "data"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "receivers.toml").write_text("")
    (tmp_path / "train.py").write_text("def build(): ...\n")
    return tmp_path


def lacking(python: Path, place: Path) -> dict[str, tuple[str, str]]:
    """Run every command; return what those lack that say so: a package, and the extra to install.

    Whatever a command finds, it loads, and never ends with a traceback.
    """
    own = ("PYTHONPATH", "VIRTUAL_ENV")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VITALS_") and k not in own}
    environ |= {"VITALS_SHM": str(place / "shm"), "XDG_DATA_HOME": str(place), "HOME": str(place)}
    found = {}
    for command, words in WORDS.items():
        done = subprocess.run(
            [python, "-m", "trainvitals", command, *words],
            cwd=place,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said = " ".join(done.stderr.split())
        assert "Traceback" not in said, (command, done.stderr)
        assert "cannot be loaded" not in said, (command, done.stderr)
        if package := NEEDS.search(said):
            extra = HINT.search(said)
            assert extra is not None, (command, said)
            found[command] = package[1], extra[1] or ""
    return found


def can_import(python: Path, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return 0 == subprocess.run([python, "-c", code], check=False).returncode


def test_every_command_is_run():
    assert {name for names in COMMANDS.values() for name in names} == WORDS.keys()


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_command_works_or_names_the_extra_that_it_needs(install, place, extra):
    python = install(extra)
    for command, (package, hinted) in lacking(python, place).items():
        assert not can_import(python, package), (command, package)
        assert hinted, f"`vitals {command}` lacks {package}, which the base does not bring"
        assert hinted != extra, f"`vitals {command}` lacks {package} in an install of [{extra}]"


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_the_doctor_knows_what_is_installed(install, place, extra):
    python = install(extra)
    done = subprocess.run(
        [python, "-m", "trainvitals", "doctor", "--format", "json"],
        cwd=place,
        env=os.environ | {"VITALS_SHM": str(place / "shm")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    checks = {check["name"]: check["status"] for check in json.loads(done.stdout)}
    for name, modules in PACKAGES.items():
        is_whole = all(can_import(python, module) for module in modules)
        assert is_whole == (checks[name] == "ok"), name
    assert "ok" == checks["base"]
