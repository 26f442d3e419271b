"""`rm -r plugins tests/plugins` leaves a product that works and reports what is not installed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOMES = ("agent", "collector", "dashboard", "deploy")
"""Directories that hold a package; the other packages are at the top."""

IN_COPY = """
import contextlib, importlib.util, io, json, sys
from pathlib import Path

checkout, copy = map(Path, sys.argv[1:])
away = {checkout, *(path for path in checkout.iterdir() if path.is_dir())}
homes = [copy, *(copy / name for name in ("agent", "collector", "dashboard", "deploy"))]
sys.path[:] = [*map(str, homes), *(path for path in sys.path if path and Path(path) not in away)]
assert importlib.util.find_spec("vitals_plugins") is None
"""

IMPORTS_ALL = """
from trainvitals.errors import MissingDependencyError

names = []
for home in homes:
    for package in sorted(home.glob("*/__init__.py")):
        for path in sorted(package.parent.rglob("*.py")):
            parts = path.relative_to(home).with_suffix("").parts
            # Alembic runs those; Streamlit runs the pages, which are in no package.
            if not {"migrations", "entry", "__main__"} & set(parts):
                names.append(".".join(parts).removesuffix(".__init__"))
                with contextlib.suppress(MissingDependencyError):  # frameworks
                    module = importlib.import_module(names[-1])
                    assert Path(module.__file__).is_relative_to(copy), module
print(json.dumps(names))
"""

RUNS_COMMANDS = """
from trainvitals.cli.main import main

results = []
for arguments in json.load(sys.stdin):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = exit_.code
    results.append((code, output.getvalue()))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of the other packages."""
    folder = tmp_path_factory.mktemp("without") / "plugins-removed"
    for name in ("trainvitals", "trainer_hooks", *HOMES):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(copy: Path, code: str, *, words: object = None):
    done = subprocess.run(
        [sys.executable, "-c", IN_COPY + code, ROOT, copy],
        cwd=copy,
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def test_every_other_module_can_be_imported(copy):
    names = run(copy, IMPORTS_ALL)
    packages = {name.partition(".")[0] for name in names}
    rings = {"trainvitals", "trainer_hooks", *(f"vitals_{name}" for name in HOMES)}
    assert rings == packages
    assert len(names) > 300


def test_a_command_of_a_plugin_reports_that_it_is_not_installed(copy, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("step,loss\n1,2.0\n")
    commands = [
        ["--help"],
        ["plan", "--params", "7e9"],
        ["preflight", "--failed-nodes"],
        ["drill", "--", "true"],
        ["repro", "runs", "3", "--entry", "train.py:build"],
        ["landscape", "runs", "--entry", "train.py:build"],
        ["mirror", "run", "--to", "trackio"],
        ["mcp", "runs"],
        ["confirm", "3f2a9c0d11e4"],
        ["skill", "install"],
        ["audit", str(log)],
        ["replay", str(log)],
        ["goodput", str(log)],
        ["doctor", "--burn-in", "1", "--yes"],
    ]
    (code, shown), *results = run(copy, RUNS_COMMANDS, words=commands)
    assert 0 == code
    listed = {line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line}
    assert {"runs", "replay", *(command[0] for command in commands[1:])} <= listed
    reinstall = "reinstall with pip install --force-reinstall --no-deps trainvitals"
    for command, (code, output) in zip(commands[1:], results, strict=True):
        assert 2 == code, (command, output)
        assert "is not part of this installation" in output, command
        assert reinstall in output, command
