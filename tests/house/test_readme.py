"""Every snippet of the README is run, and everything it names is there."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house.test_docs import COMMANDS
from trainvitals.cli.demo import expected

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S
)
VITALS = [sys.executable, "-m", "trainvitals"]


@dataclass(frozen=True)
class Block:
    """A fenced block: what the comment above it says, its language, its text."""

    mark: str
    language: str
    body: str

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(line[2:]) for line in self.body.splitlines() if line.startswith("$ ")]


BLOCKS = [Block(m["mark"] or "", m["language"], m["body"]) for m in FENCE.finditer(README)]


PROGRAMS = ("test: run; prints", "test: attach; prints")
"""Whole programs; what they print is in the block after."""


def block(mark: str) -> Block:
    (found,) = [b for b in BLOCKS if b.mark.startswith(mark)]
    return found


def after(mark: str) -> Block:
    return BLOCKS[BLOCKS.index(block(mark)) + 1]


def environment(folder: Path) -> dict[str, str]:
    (folder / "shm").mkdir(exist_ok=True)
    own = {"VITALS_SHM": str(folder / "shm"), "VITALS_AGENT": "off", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PYTHONWARNINGS": "error::ResourceWarning", "COLUMNS": "100"}


def execute(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Run the README's program of one process, then an agent, as local rank 0 would start one."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "first.py").write_text(block("test: run; prints").body)
    said = execute([sys.executable, "first.py"], folder)
    execute([*VITALS, "agent", "--dir", "vitals_runs", "--once"], folder)
    return folder, said


def test_no_block_is_without_a_test():
    known = {"test: diff", "test: console", "test: help", "test: checkpoints", *PROGRAMS}
    unmarked = [b for b in BLOCKS if b.mark not in known and not b.mark.startswith("test: answer")]
    unmarked = [b for b in unmarked if not b.mark.startswith("transcript: ")]
    for program in PROGRAMS:
        unmarked.remove(after(program))
    # What is left is about the house itself: make and pip.
    assert [["make", "demo"], ["make", "test"], ["pip", "install", "trainvitals[agent]"]] == [
        command for b in unmarked for command in b.commands
    ]
    assert all(b.commands for b in unmarked)


def test_the_program_of_one_process_prints_what_is_said(first_run):
    _, said = first_run
    assert after("test: run; prints").body == said


def test_the_program_that_keeps_its_own_step_prints_what_is_said(tmp_path):
    (tmp_path / "second.py").write_text(block("test: attach").body)
    said = execute([sys.executable, "second.py"], tmp_path)
    assert after("test: attach").body == said


def test_the_program_with_checkpoints_ends_with_its_best_state(tmp_path):
    (tmp_path / "third.py").write_text(block("test: checkpoints").body)
    execute([sys.executable, "third.py"], tmp_path)
    assert list(tmp_path.glob("vitals_runs/*/checkpoints/step-*/best"))


@pytest.mark.parametrize("command", block("test: console").commands, ids=" ".join)
def test_a_command_that_looks_back_answers(first_run, command):
    folder, _ = first_run
    assert "vitals" == command[0]
    assert execute([*VITALS, *command[1:]], folder).strip()


def test_the_answer_to_why_is_the_one_shown(first_run):
    folder, _ = first_run
    answer = next(b for b in BLOCKS if b.mark.startswith("test: answer; "))
    command = shlex.split(answer.mark.partition("; ")[2])
    said = execute([*VITALS, *command[1:]], folder)
    assert " ".join(answer.body.split()) in " ".join(said.split())


@pytest.mark.parametrize("words", block("test: help").commands, ids=" ".join)
def test_a_command_is_offered_with_these_options(words):
    path = max((p for p in COMMANDS if words[: len(p.split())] == p.split()), key=len)
    command, _ = COMMANDS[path]
    command.make_context(path, words[len(path.split()) :]).close()


def test_the_targets_and_extras_are_there():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert [] == [w for w in re.findall(r"`make (\w[\w-]*)", README) if w not in targets]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = README.partition("| extra | brings |")[2].partition("\n\n")[0]
    extras = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert set(project["optional-dependencies"]) == extras


class TestDiff:
    """The loop before and after the diff."""

    LINES = block("test: diff").body.splitlines()

    def side(self, sign: str) -> str:
        return "\n".join(line[1:] for line in self.LINES if line[:1] in (sign, " ", "")) + "\n"

    def test_it_is_an_import_and_three_lines(self):
        added = [line[1:].strip() for line in self.LINES if line.startswith("+")]
        assert "import trainer_hooks" == added[0]
        assert 3 == len(added[1:])

    @pytest.mark.dist
    def test_both_loops_train_to_the_same_loss_on_two_ranks(self, tmp_path):
        watched, said = self.on_two_ranks(tmp_path / "watched", "+")
        plain, bare = self.on_two_ranks(tmp_path / "bare", "-")
        assert float(bare.split()[-1]) == pytest.approx(float(said.split()[-1]), rel=1e-4)
        assert not (plain / "vitals_runs").exists()
        (run,) = (watched / "vitals_runs").glob("[0-9A-Z]*")
        assert "heal" == json.loads((run / "run.json").read_text())["mode"]

    def on_two_ranks(self, path: Path, sign: str) -> tuple[Path, str]:
        """Return the folder a loop ran in and its output; gloo's own abort is tried again.

        On a busy machine torch 2.13 ends a gloo process now and then with "terminate called without
        an active exception" (SIGABRT): as measured, 3 of 16 bare loops and 1 of 16 watched ones.
        """
        path.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--standalone", "--nproc-per-node", "2", "train.py"]
        for attempt in range(5):
            folder = self.folder(path / str(attempt), sign)
            try:
                return folder, execute(command, folder)
            except AssertionError as error:
                if "terminate called without an active exception" not in str(error):
                    raise
        raise AssertionError("gloo aborted five times in a row")

    def folder(self, path: Path, sign: str) -> Path:
        path.mkdir()
        (path / "train.py").write_text(self.side(sign))
        return path


class TestTranscripts:
    """Long outputs are not run again, but they must be of what is run today."""

    def test_the_demo_is_the_one_of_today(self):
        said = block("transcript: vitals demo --headless --compare").body
        for want in expected():
            rows = [line for line in said.splitlines() if f" {want.step} " in line]
            assert any(want.action in row for row in rows), want


def test_every_promise_names_a_test_that_is_there():
    table = README.partition("| promise |")[2].partition("\n\n")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)`", table)
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    assert all("`test_" in row for row in rows)
    assert len(rows) >= 10
    for row in rows:
        text = "".join(
            (ROOT / path).read_text() for path in re.findall(r"`(tests/[\w/]+\.py)`", row)
        )
        missing = [name for name in re.findall(r"`(test_\w+)`", row) if f"def {name}(" not in text]
        assert [] == missing, row
    assert named


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert [] == [link for link in links if "://" not in link and not (ROOT / link).exists()]


NAMED_IN = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *(p for room in ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard", "deploy")
      for p in (ROOT / room).rglob("*.py")),
]  # fmt: skip


def test_a_command_that_a_text_names_is_there():
    wrong = []
    for path in NAMED_IN:
        for words in re.findall(r"`vitals ([a-z]+(?: [a-z]+)?)[^`]*`", path.read_text()):
            one, _, two = words.partition(" ")
            below = [p for p in COMMANDS if p.startswith(f"vitals {one} ")]
            right = f"vitals {one}" in COMMANDS and (
                not two or not below or f"vitals {words}" in COMMANDS
            )
            if not right:
                wrong.append(f"{path.relative_to(ROOT)}: vitals {words}")
    assert [] == wrong
