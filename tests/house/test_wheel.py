"""What users install: the names it takes, what it asks for, and that torch stays as it is."""

import compileall
import email
import email.message
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import duckdb
import pytest
from packaging.requirements import Requirement

from tests.house.wheels import build_wheel

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "trainvitals",
    "trainer_hooks",
    "vitals_agent",
    "vitals_collector",
    "vitals_dashboard",
    "vitals_deploy",
    "vitals_plugins",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


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
    rooms = ("agent", "collector", "dashboard", "deploy", "plugins")
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


def test_the_base_asks_for_twelve_small_packages_and_never_for_torch(metadata):
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in base}
    small = {"msgspec", "numpy", "rich", "typer", "httpx", "httpcore", "cryptography"}
    agent = {"psutil", "nvidia-ml-py", "prometheus-client"}
    reading = {"sqlalchemy", "alembic"}
    assert small | agent | reading == names


def test_no_requirement_has_an_upper_limit(metadata):
    # A limit of ours would hold back, or break, somebody else's whole environment. The store's
    # engine is the exception, and the collector's alone: each extension is made for one version.
    versions = [line.partition(";")[0] for line in metadata.get_all("Requires-Dist", [])]
    limited = {line.strip() for line in versions if re.search("<|==|~=", line)}
    extensions = ("ducklake", "sqlite-scanner", "postgres-scanner", "httpfs")
    parts = ("", *(f"-extension-{name}" for name in extensions))
    assert {f"duckdb{part}=={duckdb.__version__}" for part in parts} == limited


def test_the_metadata_is_complete(metadata):
    assert "trainvitals" == metadata["Name"]
    assert "Apache-2.0" == metadata["License-Expression"]
    assert ">=3.11" == metadata["Requires-Python"]
    extras = {
        "torch",
        "collector",
        "postgresql",
        "notify",
        "remote-write",
        "s3",
        "dashboard",
        "oidc",
        "grafana",
        "replay",
        "all",
    }
    extras |= {"tensorboard", "wandb", "mlflow", "trackio", "otlp", "mcp"}
    extras |= {"huggingface", "trl", "accelerate", "lightning", "deepspeed", "torchtitan"}
    assert extras == set(metadata.get_all("Provides-Extra", []))


@pytest.mark.nightly
@pytest.mark.parametrize("extra", ["[all]", "[torch]", ""])
def test_installing_it_changes_no_package_that_is_installed(wheel, extra, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--report", report, f"{wheel}{extra}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    changed = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert changed <= {"trainvitals"}


TRAINING = """
import torch
import trainvitals

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
with trainvitals.watch(model, optimizer, run="first") as monitor:
    for step in range(40):
        loss = model(torch.randn(32, 8)).square().mean() * (float("nan") if step == 20 else 1.0)
        loss.backward()
        monitor.step(loss, max_norm=1.0)
"""


def brought_by(*lines: str) -> set[str]:
    """Return the distributions that an installation of these requirements brings here."""
    brought: set[str] = set()
    waiting = [(line, "") for line in lines]
    while waiting:
        line, extra = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name in brought:
            continue
        brought.add(name)
        below = importlib.metadata.requires(name) or []
        waiting += [(each, extra) for each in below for extra in ("", *requirement.extras)]
    return brought


@pytest.fixture(scope="module")
def installed(wheel, metadata, tmp_path_factory) -> Path:
    """Return a fresh environment's python: the wheel, what its base asks for, and torch.

    The packages are links to those of this environment, so that nothing is downloaded.
    """
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    for name in brought_by(*base, "torch"):
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Once, as pip does: a dozen processes are started, and may not write bytecode by themselves.
    compileall.compile_dir(site, quiet=1)
    return home / "venv" / "bin" / "python"


@pytest.mark.nightly
class TestBaseInstall:
    """What `pip install trainvitals` beside a torch gives."""

    def run(self, python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        (folder / "shm").mkdir(exist_ok=True)
        environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VITALS_AGENT")}
        return subprocess.run(
            [python, *arguments],
            cwd=folder,
            env=environ | {"VITALS_SHM": str(folder / "shm"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    @pytest.mark.slow
    def test_it_trains_with_an_agent_and_reads_the_run_offline(self, installed, tmp_path):
        (tmp_path / "first.py").write_text(TRAINING)
        done = self.run(installed, tmp_path, "first.py")
        assert (0, "") == (done.returncode, done.stdout), done.stderr
        vitals = ("-m", "trainvitals")
        for command in (
            ["runs"],
            ["show"],
            ["tail"],
            ["export"],
            ["query", "steps"],
            ["postmortem"],
            ["replay", "--dir"],
        ):
            done = self.run(installed, tmp_path, *vitals, *command, "vitals_runs")
            assert 0 == done.returncode, (command, done.stderr)
            assert done.stdout.strip()
        done = self.run(installed, tmp_path, *vitals, "why", "vitals_runs", "20")
        assert "the update was skipped" in " ".join(done.stdout.split()), done.stderr

    @pytest.mark.parametrize(
        ("command", "extra"),
        [
            (["dashboard", "vitals_runs"], "dashboard"),
            (["collector", "--folder", "vitals_runs"], "collector"),
            (["sql", "FROM runs", "--data", "data"], "collector"),
            (["store", "size", "--data", "data"], "collector"),
        ],
        ids=lambda words: words if isinstance(words, str) else words[0],
    )
    def test_what_needs_more_says_which_extra(self, installed, tmp_path, command, extra):
        (tmp_path / "vitals_runs").mkdir()
        (tmp_path / "data" / "lake").mkdir(parents=True, mode=0o700)
        (tmp_path / "data" / "vitals.db").touch()
        (tmp_path / "data" / "lake" / "catalogue.sqlite").touch()
        done = self.run(installed, tmp_path, "-m", "trainvitals", *command)
        assert 0 != done.returncode
        assert f"pip install 'trainvitals[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr
