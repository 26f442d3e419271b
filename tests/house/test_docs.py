"""What a person reads is what the code is: generated pages, help, the list of targets."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.house.generated import COMMANDS, build_docs
from trainvitals.catalog import CATALOG
from trainvitals.errors import TrainingHalted
from trainvitals.policy.judge import SECTIONS

ROOT = Path(__file__).parents[2]


# To draw the detectors takes seconds.
PAGES = [
    pytest.param(name, marks=[pytest.mark.nightly] if name == "DETECTORS.md" else [])
    for name in build_docs.PAGES
]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name):
    text = (ROOT / "docs" / name).read_text()
    assert build_docs.PAGES[name]() == text, f"docs/{name} is stale: run `make docs`"


@pytest.mark.nightly
def test_every_generated_picture_is_current():
    drawn = build_docs.IMAGES()
    folders = {(ROOT / "docs" / name).parent for name in drawn}
    found = [path for folder in folders for path in folder.glob("*.svg")]
    there = {str(path.relative_to(ROOT / "docs")): path.read_text() for path in found}
    stale = [name for name in drawn.keys() | there.keys() if drawn.get(name) != there.get(name)]
    assert [] == stale, "run `make docs`; remove what it does not write"


def test_the_site_has_every_page():
    outside = {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    records = {page for page in pages if re.match(r"decisions/(\d|appendix)", page)}
    assert sorted(pages - records | outside) == sorted(listed), "decisions/README.md lists records"


def test_every_metric_is_described():
    page = build_docs.metrics_page()
    assert [] == [metric.name for metric in CATALOG if f"| `{metric.name}` |" not in page]


def test_every_error_has_a_code_of_its_own_and_is_described():
    errors = build_docs.error_classes()
    assert TrainingHalted in errors
    assert len(errors) == len({error.code for error in errors})
    page = build_docs.errors_page()
    assert [] == [error.code for error in errors if f"| {error.code} |" not in page]


def test_every_code_in_the_source_is_described():
    page = build_docs.errors_page()
    rooms = ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard", "deploy", "plugins")
    sources = [p.read_text() for room in rooms for p in (ROOT / room).rglob("*.py")]
    used = {code for text in sources for code in re.findall(r'"(V[0-6]\d\d)"', text)}
    assert len(used) > 20
    assert [] == sorted(code for code in used if f"| {code} |" not in page)


def test_every_setting_is_described():
    page = build_docs.settings_page()
    assert [] == [name for name in SECTIONS if f"## `[{name}]`" not in page]
    assert "| `progress` | 25.0 | Multiple of the run's progress " in page
    assert "| `grad_norm_ratio` | 100.0 | Multiple of the median gradient norm; " in page
    assert "|  |" not in page


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_is_there_and_its_help_ends_with_an_example(path):
    command, context = COMMANDS[path]
    text = command.get_help(context)
    assert "Not available" not in (command.help or ""), command.help
    last = text.rstrip().rpartition("\n\n")[2].strip()
    assert last.startswith("Example: vitals "), f"add epilog='Example: vitals ...' to `{path}`"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_is_explained(path):
    command, _ = COMMANDS[path]
    silent = [
        p.name
        for p in command.params
        if p.param_type_name == "option" and not p.help and not p.hidden
    ]
    assert [] == silent


class TestMakefile:
    def make(self, *arguments: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        done = subprocess.run(
            ["make", "--no-print-directory", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    @pytest.mark.parametrize("target", ["demo", "test", "docs"])
    def test_every_target_makes_its_own_environment_first(self, target, tmp_path):
        plan = self.make("--dry-run", target, f"VENV={tmp_path / 'venv'}")
        assert f"-m venv {tmp_path / 'venv'}" in plan
        assert "--constraint constraints.txt" in plan

    def test_a_python_that_is_too_old_is_said_to_be_one(self, tmp_path):
        old = tmp_path / "python3.9"
        old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" || exit 1\n')
        old.chmod(0o755)
        said = self.make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
        assert "needs Python 3.11 or newer" in said
        assert "Python 3.9.2" in said
        assert not (tmp_path / "venv").exists()


def test_the_version_is_said_once():
    from importlib.metadata import version

    from trainvitals import __version__

    assert version("trainvitals") == __version__
