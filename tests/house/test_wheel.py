"""What users install: the names it takes, what it asks for, and that torch stays as it is."""

import email
import email.message
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "trainvitals",
    "trainer_hooks",
    "vitals_agent",
    "vitals_collector",
    "vitals_dashboard",
    "vitals_deploy",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, ROOT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_it_takes_only_our_distinctive_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    distribution = {name for name in names if name.endswith(".dist-info")}
    assert PACKAGES == names - distribution
    assert 1 == len(distribution)
    assert next(iter(distribution)).startswith("trainvitals-")


def test_it_holds_every_file_of_ours_and_no_rubbish(wheel):
    rooms = ("agent", "collector", "dashboard", "deploy")
    roots = (ROOT, *(ROOT / room for room in rooms))
    ours = {
        str(path.relative_to(root))
        for root in roots
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert ours == packed


def test_it_has_no_benches(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert [] == [name for name in names if "bench" in name]
        assert "bench" not in archive.read(points).decode()


def test_types_are_shipped(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert {"trainvitals/py.typed", "trainer_hooks/py.typed"} <= set(archive.namelist())


def test_the_base_asks_for_ten_small_packages_and_never_for_torch(metadata):
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in base}
    small = {"msgspec", "numpy", "rich", "typer", "httpx"}
    agent = {"psutil", "nvidia-ml-py", "prometheus-client"}
    reading = {"sqlalchemy", "alembic"}
    assert small | agent | reading == names


def test_no_requirement_has_an_upper_limit(metadata):
    # A limit of ours would hold back, or break, somebody else's whole environment.
    versions = [line.partition(";")[0] for line in metadata.get_all("Requires-Dist", [])]
    assert [] == [line for line in versions if re.search("<|==|~=", line)]


def test_the_metadata_is_complete(metadata):
    assert "trainvitals" == metadata["Name"]
    assert "Apache-2.0" == metadata["License-Expression"]
    assert ">=3.11" == metadata["Requires-Python"]
    extras = {
        "torch",
        "collector",
        "postgresql",
        "parquet",
        "dashboard",
        "grafana",
        "replay",
        "all",
    }
    extras |= {"huggingface", "accelerate", "lightning", "deepspeed", "torchtitan"}
    assert extras == set(metadata.get_all("Provides-Extra", []))


@pytest.mark.parametrize("extra", ["", "[torch]", "[all]"])
def test_installing_it_changes_no_package_that_is_installed(wheel, extra, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--report", report, f"{wheel}{extra}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    changed = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert changed <= {"trainvitals"}
