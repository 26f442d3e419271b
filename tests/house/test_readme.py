"""Every snippet of the README is run, and everything it names is there; it stays short."""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.generated import COMMANDS
from tests.house.pages import (
    FENCE,
    GUARANTEES,
    GUIDES,
    README,
    ROOT,
    after,
    block,
    blocks,
    execute,
)
from vitals_bench.gpu import report

MOST_WORDS = 900
QUICKSTART = ROOT / "docs" / "guides" / "quickstart.md"
TEXT = README.read_text()
PROGRAM = "test: run; prints"


def test_it_is_read_in_a_few_minutes():
    assert len(TEXT.split()) <= MOST_WORDS


def test_it_states_early_what_was_run_on_gpus():
    before, _, _ = TEXT.replace("\n> ", "\n").partition("## What was tested")
    assert report.describe_status(report.load_results()) in " ".join(before.split()[:80])


def test_no_block_is_without_a_test():
    # The program and the commands that look back at it are run by test_guides.py.
    tested = {"test: diff", "test: console", PROGRAM}
    unmarked = [
        b for b in blocks(README) if b.mark not in tested and not b.mark.startswith("test: answer")
    ]
    unmarked.remove(after(README, PROGRAM))
    # What is left is about the house itself: make and pip.
    assert [["pip", "install", "trainvitals"], ["vitals", "doctor"]] == [
        command for b in unmarked for command in b.commands
    ]
    assert all(b.commands for b in unmarked)


def test_the_targets_are_there():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    pages = [README, GUARANTEES, *GUIDES]
    named = [word for page in pages for word in re.findall(r"`make (\w[\w-]*)", page.read_text())]
    assert [] == [word for word in named if word not in targets]


def test_every_extra_is_explained():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "guides" / "install.md").read_text()
    table = page.partition("| extra | adds |")[2].partition("\n\n")[0]
    extras = set(re.findall(r"^\| `([\w-]+)` \|", table, re.M))
    assert set(project["optional-dependencies"]) == extras


def test_every_package_of_a_plain_install_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "guides" / "install.md").read_text()
    row = page.partition("| (none) |")[2].partition("\n")[0].lower()
    packages = [re.split(r"[\[>=<]", line)[0] for line in project["dependencies"]]
    assert [] == [name for name in packages if name not in row]


def test_the_cost_is_the_one_that_was_measured():
    watched, bare = re.findall(r"took (\d+ ms), and (\d+ ms) without Vitals", TEXT)[0]
    page = (ROOT / "docs" / "figures.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| a whole step of 10.1M")]
    figures = f", watched | {watched} | the bare loop with a clip | {bare} |"
    assert 1 == len([row for row in rows if figures in row])


def test_the_losses_of_the_demo_are_those_of_its_transcript():
    transcript = block(ROOT / "docs" / "guides" / "demo.md", "transcript: ").body
    (guarded,) = re.findall(r"guarded, three faults .* \+([\d.]+ %)", transcript)
    text = " ".join(TEXT.split())
    assert f"ended {guarded.replace(' %', '%')} above the clean validation loss" in text
    assert 2 == len(re.findall(r"unguarded: .* not finite", transcript))


class TestDiff:
    """The loop before and after the diff."""

    LINES = block(QUICKSTART, "test: diff").body.splitlines()

    def side(self, sign: str) -> str:
        return "\n".join(line[1:] for line in self.LINES if line[:1] in (sign, " ", "")) + "\n"

    def test_it_is_an_import_and_three_lines_and_one_more_for_the_probe(self):
        added = [line[1:].strip() for line in self.LINES if line.startswith("+")]
        assert "import trainvitals" == added[0]
        assert added[1].startswith("probe = ")
        assert 3 == len(added[2:])

    def test_the_readme_shows_lines_of_it_in_the_same_order(self):
        whole = iter(self.LINES)
        shown = block(README, "test: diff").body.splitlines()
        assert [] == [line for line in shown if line != " ..." and line not in whole]

    @pytest.mark.slow
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


def test_every_promise_names_a_test_that_is_there():
    text = GUARANTEES.read_text().partition("\n## ")[2].partition("\n## Limits")[0]
    rows = text.replace("\n  ", " ").split("\n- ")[1:]
    assert all("`test_" in row and "`tests/" in row for row in rows)
    assert len(rows) >= 10
    for row in rows:
        text = "".join(
            (ROOT / path).read_text() for path in re.findall(r"`(tests/[\w/]+\.py)`", row)
        )
        missing = [name for name in re.findall(r"`(test_\w+)`", row) if f"def {name}(" not in text]
        assert [] == missing, row


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    wrong = []
    text = FENCE.sub("", page.read_text())
    for link, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        target = page.parent / link if link else page
        if "://" not in link and not (target.exists() and (not place or place in places(target))):
            wrong.append(f"{link}#{place}")
    assert [] == wrong


def places(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_snippet_can_be_read(page):
    """Most are run as well, each by the test that its mark names; a diff in hunks is applied."""
    for b in blocks(page):
        if b.language == "python":
            ast.parse(b.body)
        elif b.language == "diff" and not b.mark.startswith("test: loop"):
            for sign in "+-":
                ast.parse("\n".join(line[1:] for line in b.body.splitlines() if line[:1] != sign))
        elif b.language == "toml":
            tomllib.loads(b.body)
        elif b.language == "json":
            json.loads(b.body)
        else:
            assert b.language in KNOWN_LANGUAGES, b


KNOWN_LANGUAGES = ("", "bash", "sh", "console", "diff", "sql", "text", "yaml")
"""What is not read here: outputs, and what a shell or a cluster reads."""


def test_every_page_is_two_clicks_from_the_readme():
    contents = ROOT / "docs" / "contents.md"
    assert f"({contents.relative_to(ROOT)})" in TEXT
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", contents.read_text()))
    pages = {str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md")}
    records = {page for page in pages if re.match(r"decisions/(\d|appendix)", page)}
    pages -= records | {"contents.md"}
    outside = {f"../{p.name}" for p in ROOT.glob("*.md")}
    assert sorted(pages | outside) == sorted(linked)


NAMED_IN = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *(p for room in ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard", "deploy",
                     "plugins")
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
