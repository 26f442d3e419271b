"""What the guides show is what there is: each snippet is run, each command has its options."""

import re
import shlex

import pytest

from tests.house.generated import COMMANDS
from tests.house.pages import (
    GUIDES,
    README,
    ROOT,
    VITALS,
    after,
    ask_all,
    block,
    blocks,
    execute,
    run_program,
)
from tests.support.examples import one_in
from trainer_hooks.exchange.reduce_vector import MAX_SLOTS
from trainer_hooks.features import vector_fields
from trainvitals.cli.demo import list_expected_decisions
from trainvitals.policy.judge import SECTIONS, load_judge_config

FOLDER = ROOT / "docs" / "guides"
INSPECT = FOLDER / "inspect.md"
WITH_COMMANDS = [
    page
    for page in GUIDES
    if any(
        words[0] == "vitals"
        for b in blocks(page)
        if b.language == "console"
        for words in b.commands
    )
]
PROGRAMS = [
    pytest.param(page, number, id=f"{page.stem}-{number}")
    for page in GUIDES
    for number, b in enumerate(blocks(page))
    if b.mark.startswith("test: run")
]


ANSWERS = [
    pytest.param(b.mark.partition("; ")[2], b.body, id=f"{page.stem}-{number}")
    for page in [README, *GUIDES]
    for number, b in enumerate(blocks(page))
    if b.mark.startswith("test: answer; ")
]
"""Commands, and the part of their output that a page shows."""


LOOKS_BACK = [*block(README, "test: console").commands, *block(INSPECT, "test: console").commands]
LOOK_BACK = [*LOOKS_BACK, *(shlex.split(answer.values[0]) for answer in ANSWERS)]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Run the README's program of one process, then an agent, as local rank 0 would start one."""
    folder = tmp_path_factory.mktemp("readme")
    printed = run_program(block(README, "test: run; prints"), folder)
    (folder / "printed").write_text(printed)
    execute([*VITALS, "agent", "--dir", "vitals_runs", "--once"], folder)
    return folder


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_no_block_is_without_a_test(page):
    # `run; gives` is run by tests/trainvitals/test_client.py; what a console shows is tested below.
    tested = ("test: ", "transcript: ", "run; gives")
    every = blocks(page)
    for number, b in enumerate(every):
        is_output = number and every[number - 1].mark.endswith(("prints", "gives"))
        is_shell = b.language in ("console", "bash")
        assert b.mark.startswith(tested) or is_shell or is_output, b


@pytest.mark.parametrize(("page", "number"), one_in(3, PROGRAMS))
def test_a_program_runs_and_prints_what_is_shown(page, number, tmp_path):
    every = blocks(page)
    printed = run_program(every[number], tmp_path)
    if every[number].mark.endswith("; prints"):
        assert every[number + 1].body == printed


@pytest.mark.nightly
def test_the_program_with_checkpoints_ends_with_its_best_state(tmp_path):
    run_program(block(FOLDER / "checkpoints.md", "test: checkpoints"), tmp_path)
    assert list(tmp_path.glob("vitals_runs/*/checkpoints/step-*/best"))


def test_the_program_of_the_readme_prints_what_is_shown(first_run):
    assert after(README, "test: run; prints").body == (first_run / "printed").read_text()


@pytest.fixture(scope="module")
def answers(first_run):
    """Ask everything in one process: to start one takes longer than to answer."""
    asked = [command[1:] for command in LOOK_BACK]
    return dict(zip(map(shlex.join, LOOK_BACK), ask_all(asked, first_run), strict=True))


@pytest.mark.parametrize("command", LOOKS_BACK, ids=" ".join)
def test_a_command_that_looks_back_answers(answers, command):
    assert "vitals" == command[0]
    assert answers[shlex.join(command)].strip()


@pytest.mark.parametrize(("command", "shown"), ANSWERS)
def test_an_answer_is_the_one_shown(answers, command, shown):
    what_varies = r"\b01[0-9A-Z]{24}\b|\b20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ"
    printed, shown = (re.sub(what_varies, "...", text) for text in (answers[command], shown))
    assert " ".join(shown.split()) in " ".join(printed.split())


def test_three_pages_show_answers():
    assert {"README", "inspect", "results"} <= {answer.id.rpartition("-")[0] for answer in ANSWERS}


@pytest.mark.parametrize("words", block(FOLDER / "operate.md", "test: help").commands, ids=" ".join)
def test_a_command_is_offered_with_these_options(words):
    path = max((p for p in COMMANDS if words[: len(p.split())] == p.split()), key=len)
    command, _ = COMMANDS[path]
    command.make_context(path, words[len(path.split()) :]).close()


def test_the_settings_that_a_guide_shows_are_accepted(tmp_path):
    shown = block(FOLDER / "settings.md", "test: settings").body
    path = tmp_path / "settings.toml"
    path.write_text(shown)
    config = load_judge_config({"VITALS_CONFIG": str(path)})
    assert 3.0 == config.detect.loss.min_ratio != load_judge_config({}).detect.loss.min_ratio
    assert 2 == config.ladder.max_tries != load_judge_config({}).ladder.max_tries


def test_the_size_of_the_exchange_is_the_one_in_the_guide():
    page = " ".join((FOLDER / "cost.md").read_text().split())
    fields = vector_fields()
    per_rank = 8 * len(fields.rank)
    shared, own = 2 * MAX_SLOTS * per_rank // 1024, 8 * len(fields.exact)
    total = shared + 16_384 * own // 1024
    assert f"{per_rank} bytes per rank up to {MAX_SLOTS:,} ranks" in page
    assert f"{shared} KiB and {own} bytes per rank, for example {total} KiB with 16,384" in page


def test_the_demo_is_the_one_of_today():
    # Long outputs are not run again, but they must be of what is run today.
    shown = block(FOLDER / "demo.md", "transcript: vitals demo --headless --compare").body
    for want in list_expected_decisions():
        rows = [line for line in shown.splitlines() if f" {want.step} " in line]
        assert any(want.action in row for row in rows), want


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_a_command_that_is_shown_is_there_with_its_options(page):
    shown = [words for b in blocks(page) if b.language == "console" for words in b.commands]
    for typed in (words for words in shown if words[0] == "vitals"):
        words = typed[: typed.index("--")] if "--" in typed else typed
        depth = max(n for n in range(len(words) + 1) if " ".join(words[:n]) in {"", *COMMANDS})
        command, _ = COMMANDS[" ".join(words[:depth])]
        options = {option for p in command.params for option in p.opts}
        unknown = [word for word in words[depth:] if word.startswith("--") and word not in options]
        assert (True, []) == (depth > 1, unknown), words


def test_the_guides_show_commands():
    assert len(WITH_COMMANDS) >= 10


@pytest.mark.parametrize("page", [README, *GUIDES], ids=lambda page: page.stem)
def test_a_setting_that_is_named_is_read_somewhere(page):
    settings = {
        f"VITALS_{section}_{field}".upper()
        for section, cls in SECTIONS.items()
        for field in cls.__struct_fields__
    }
    code = "".join(
        path.read_text()
        for room in ("trainvitals", "trainer_hooks", "agent", "collector", "deploy", "plugins")
        for path in (ROOT / room).rglob("*.py")
    )
    named = set(re.findall(r"VITALS_\w+", page.read_text()))
    assert [] == [name for name in named - settings if name not in code]


def test_the_concepts_are_explained():
    text = (FOLDER / "concepts.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert ["Step", "Attempt", "Incident", "Escalation policy", "Probe", "Health"] == titles
