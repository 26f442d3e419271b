"""The lock has all that development installs, by its hash; what is installed can be listed."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load_lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "supply" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock = load_lock()
LOCKED = lock.entries(lock.LOCK.read_text())


def wanted() -> list[Requirement]:
    """What pyproject.toml asks of a development environment, and constraints.txt of it."""
    extras = PROJECT["project"]["optional-dependencies"]
    every = Requirement(extras["all"][0]).extras
    lines = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    lines += [line for extra in every for line in extras[extra]]
    lines += [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    found = [Requirement(line) for line in lines]
    wanted = (each for each in found if each.name not in ("torch", "trainvitals"))
    return sorted(wanted, key=str)


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_what_is_asked_for_is_locked_in_a_version_that_fits(requirement: Requirement):
    name = canonicalize_name(requirement.name)
    assert name in LOCKED, "requirements.lock is stale: run `make lock`"
    assert LOCKED[name][0] in requirement.specifier, "requirements.lock is stale: run `make lock`"


def test_each_entry_of_the_lock_is_one_file_and_names_no_place():
    lines = [line for line in lock.LOCK.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(LOCKED)
    assert "torch" not in LOCKED
    assert "://" not in lock.LOCK.read_text()


def test_what_the_locked_packages_need_is_locked_too():
    there = {*lock.required(), "torch"}
    assert [] == sorted(there - {*LOCKED, "torch"}), "run `make lock`"


def test_a_locked_set_up_installs_by_hash_alone(tmp_path: Path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", "--dry-run", "setup", "LOCKED=1", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "--no-deps --require-hashes --requirement requirements.lock" in done.stdout
    assert "'.[all]'" not in done.stdout


def test_what_others_wrote_is_shipped_as_they_released_it_with_its_licence():
    folder = ROOT / "dashboard" / "vitals_dashboard" / "charts" / "browser"
    # uPlot 1.6.32, dist/uPlot.esm.js of the npm package
    expected = "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba"
    assert expected == hashlib.sha256((folder / "uPlot.esm.js").read_bytes()).hexdigest()
    assert "MIT License" in (folder / "uPlot.LICENSE").read_text()


def tool(name: str) -> str:
    """The path of a tool of the group ``supply``; skips where it is not installed."""
    found = shutil.which(name, path=f"{ROOT / 'build' / 'supply' / 'bin'}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"needs {name}: make sbom licences")
    return found


def test_what_is_installed_is_listed_as_cyclonedx(tmp_path: Path):
    out = tmp_path / "sbom.json"
    command = [tool("cyclonedx-py"), "environment", sys.executable, "--output-file", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    listed = json.loads(out.read_text())
    assert "CycloneDX" == listed["bomFormat"]
    names = {canonicalize_name(component["name"]) for component in listed["components"]}
    assert {"msgspec", "numpy", "torch"} <= names


def test_licences_of_what_is_installed_are_listed(tmp_path: Path):
    command = [tool("pip-licenses"), "--python", sys.executable, "--format", "json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    licences = {canonicalize_name(row["Name"]): row["License"] for row in json.loads(done.stdout)}
    assert "BSD-3-Clause" in licences["msgspec"]
