"""The job of continuous integration: its retry, and its exit status."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.pages import ROOT

FLAKY_TEST = """
from pathlib import Path

def test_passes_at_the_second_run():
    first = not Path("ran").exists()
    Path("ran").touch()
    assert not first
"""
BROKEN_TEST = """
def test_never_passes():
    assert False
"""


def run_job(folder: Path, *, lint: str, tests: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the job over its own tests, with the real recipe of the retry."""
    recipe = re.search(r"^test-again:.*\n(\t.*\n)+", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    (folder / "Makefile").write_text(
        f"PYTEST := {sys.executable} -m pytest\n"
        f"deploy-tools:\ntest:\n\t{lint}\n\t$(PYTEST) test_it.py\n"
        + recipe.group().replace("$(STAMP)", "")
    )
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    # The programs that apt-get would install.
    programs = folder / "programs"
    programs.mkdir()
    for name in ("prometheus", "prometheus-alertmanager", "chromium", "nginx"):
        (programs / name).symlink_to("/bin/true")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "PYTEST"))}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [folder / ".ci" / "run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("lint", "tests", "status", "flaky"),
    [
        ("true", FLAKY_TEST, 0, ["test_it.py::test_passes_at_the_second_run"]),
        ("true", FLAKY_TEST + BROKEN_TEST, 1, ["test_it.py::test_passes_at_the_second_run"]),
        ("false", FLAKY_TEST, 1, []),
    ],
    ids=["flaky", "broken", "lint"],
)
def test_failed_tests_run_once_more_and_flaky_ones_are_named(tmp_path, lint, tests, status, flaky):
    done = run_job(tmp_path, lint=lint, tests=tests)
    assert status == done.returncode, done.stdout + done.stderr
    assert flaky == re.findall(r"^FLAKY: (\S+)", done.stdout, re.M)
