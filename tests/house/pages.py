"""Reads the pages for people: their fenced blocks, and how a block is run."""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked import COMMANDS, TRAINING

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUARANTEES = ROOT / "docs" / "GUARANTEES.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
VITALS = [sys.executable, "-m", "trainvitals"]
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block: what the comment above it says, its language, its text."""

    mark: str
    language: str
    body: str

    @property
    def commands(self) -> list[list[str]]:
        """The lines that a person types."""
        return [shlex.split(line[2:]) for line in self.body.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    """Return the page's blocks in their order."""
    return [
        Block(m["mark"] or "", m["language"], m["body"]) for m in FENCE.finditer(page.read_text())
    ]


def block(page: Path, mark: str) -> Block:
    """Return the one block of the page whose mark begins so."""
    (marked,) = [b for b in blocks(page) if b.mark.startswith(mark)]
    return marked


def after(page: Path, mark: str) -> Block:
    """Return the block that follows the marked one: what it prints."""
    every = blocks(page)
    return every[every.index(block(page, mark)) + 1]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which a snippet runs, alone in its folder and without an agent."""
    (folder / "shm").mkdir(exist_ok=True)
    own = {"VITALS_SHM": str(folder / "shm"), "VITALS_AGENT": "off", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PYTHONWARNINGS": "error::ResourceWarning", "COLUMNS": "100"}


def execute(command: list[str], folder: Path) -> str:
    """Run it in the folder; return what it printed. It must end well."""
    forks = COMMANDS if command[1] == "-m" else TRAINING
    done = forks.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


_ASK_ALL = """
import contextlib, io, json, sys
from trainvitals.cli.main import main

for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def ask_all(commands: Sequence[list[str]], folder: Path) -> list[str]:
    """Run commands of ``vitals``, one after the other in one process; return what each printed."""
    done = COMMANDS.run(
        [sys.executable, "-c", _ASK_ALL],
        cwd=folder,
        env=environment(folder),
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for command, (code, out, err) in zip(commands, answers, strict=True):
        assert code == 0, f"vitals {shlex.join(command)}\n{out}{err}"
    return [out for _, out, _ in answers]


def run_program(program: Block, folder: Path) -> str:
    """Run a block as a program of its own; return what it printed."""
    (folder / "train.py").write_text(program.body)
    return execute([sys.executable, "train.py"], folder)
