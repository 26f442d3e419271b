"""A post-training run that collapses, as its commands show it: quantities first, loss last."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.collector.lookback import finding
from tests.collector.rows import RUN, Writer
from tests.support.cli import leave, vitals
from trainvitals.catalog import SCALARS_SCHEMA
from trainvitals.detect.posttraining.set import WATCHERS
from trainvitals.detect.registry import KINDS
from trainvitals.io.completions import Completion, StoredCompletions, store_completions
from trainvitals.records import NamesDefined, RunEnded, RunInfo, RunStarted
from vitals_collector.queries.advice import advice

IDS = {"entropy": 0, "reward": 1, "kl": 2, "completions/mean_length": 3}
ONSET, STEP, LAST = 54, 72, 110
"""The entropy falls at step 50, the reward at step 70."""


def scalars(step: int) -> Mapping[str, float]:
    reward = 0.1 + 0.01 * min(step, 50) if step < 70 else 0.1
    return {
        "entropy": 1.0 if step < 50 else 0.01,
        "reward": reward,
        "kl": 0.01 * step,
        "completions/mean_length": 120.0,
    }


def collapsed_run(folder: Path, *, task: str = "grpo") -> None:
    rank = Writer(world_size=1)
    named = NamesDefined(stream="scalars", names={n: name for name, n in IDS.items()})
    info = RunInfo(name="policy", world_size=1, task=task)
    steps = range(LAST + 1)
    rows = [
        [step, 1, rank.time_of(step), 0, IDS[name], value]
        for step in steps
        for name, value in scalars(step).items()
    ]
    leave(
        folder,
        rank.events(RunStarted(info=info), named),
        rank.steps(steps, loss=0.001, grad_norm=0.5),
        rank.batch(SCALARS_SCHEMA, rows),
        rank.events(RunEnded(state="finished"), step=LAST),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    collapsed_run(tmp_path)
    return tmp_path


def said_by(capsys: pytest.CaptureFixture[str], *command: object) -> str:
    assert 0 == vitals(*command)
    return " ".join(capsys.readouterr().out.split())


def in_order(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def test_show_has_the_incident_with_its_next_action_and_draws_the_loss_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    text = said_by(capsys, "show", folder)
    assert f"1-{ONSET}-policy_collapse" in text
    assert "the policy collapsed: its entropy fell from 1 to 0.01".lower() in text.lower()
    assert f"Continue from a checkpoint before step {ONSET}" in text
    assert f"`vitals why {RUN} {ONSET}`" in text
    curves = [f"{name}: 111 steps" for name in ("reward", "kl", "completions/mean_length")]
    assert in_order(text, *curves, "gradient norm: 111 steps", "loss: 111 steps")


def test_show_lists_all_incidents_if_there_is_not_only_the_one_of_the_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    header = "FROM STEP TO STEP SEVERITY STATE INCIDENT"
    assert header not in said_by(capsys, "show", folder)
    later = finding("plateau", LAST, level="advisory", cause="plateau", onset_step=LAST - 2)
    leave(folder, Writer("rank:1", world_size=1).events(later, step=LAST))
    text = said_by(capsys, "show", folder)
    (place,) = [match.end() for match in re.finditer(header, text)]
    table = text[place : text.index("STEP ACTION", place)]
    assert in_order(table, f"Plateau at step {LAST - 2}", f"Policy collapse at step {ONSET}")
    shown = json.loads(said_by(capsys, "show", folder, "--format", "json"))
    assert [LAST - 2, ONSET] == [line["onset_step"] for line in shown["incidents"]]


def test_why_names_the_problem_where_it_began_and_where_it_was_certain(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    text = said_by(capsys, "why", folder, ONSET)
    assert "No findings" not in text
    assert "Logged: reward 0.6, kl 0.54, entropy 0.01, completions/mean_length 120." in text
    assert f"Began here, reported at step {STEP}: the policy collapsed" in text
    assert f"vitals postmortem {RUN} --incident 1-{ONSET}-policy_collapse" in text
    text = said_by(capsys, "why", folder, STEP)
    assert "Finding (advisory): the policy collapsed" in text
    assert "Began here" not in text


def test_why_prints_the_samples_that_the_run_directory_has_and_nothing_else_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    sample = Completion(prompt="2 + 2 =\x1b[31m", completion="4\n4 4", reward=0.25, num_cut=9)
    stored = StoredCompletions(
        step=ONSET,
        attempt=1,
        finding="policy_collapse",
        onset_step=ONSET,
        reported_step=STEP,
        samples=(sample,),
    )
    store_completions(folder / RUN, stored)
    assert 0 == vitals("why", folder, ONSET)
    text = capsys.readouterr().out
    assert text.endswith(
        f"Completions of step {ONSET}, where policy collapse began ({stored.name}):\n"
        "- reward 0.25, 9 characters cut\n"
        "  prompt:\n    2 + 2 = [31m\n  completion:\n    4\n    4 4\n"
    )
    assert "Completions of step 54" in said_by(capsys, "why", folder, STEP)
    assert "Completions" not in said_by(capsys, "why", folder, ONSET - 1)
    page = folder / "page.html"
    said = said_by(capsys, "postmortem", folder, "--html", page)
    said += said_by(capsys, "postmortem", folder, "--format", "json")
    said += said_by(capsys, "show", folder, "--format", "json")
    said += said_by(capsys, "why", folder, ONSET, "--format", "json")
    assert "2 + 2" not in said + page.read_text()


def test_two_problems_of_a_step_share_their_samples_and_a_name_has_no_control_characters(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    samples = (Completion(prompt="p", completion="c\x1b]0;x\x07\u202e\r\nd", reward=0.25),)
    for kind, step in (("policy_collapse", ONSET), ("forged\x1b[2J", ONSET - 4)):
        stored = StoredCompletions(
            step=ONSET,
            attempt=1,
            finding=kind,
            onset_step=step,
            reported_step=STEP,
            samples=samples,
        )
        store_completions(folder / RUN, stored)
    assert 0 == vitals("why", folder, ONSET)
    text = capsys.readouterr().out
    lines = text[text.index("Completions") :].splitlines()
    assert lines[0].startswith(f"Completions of step {ONSET}, near step {ONSET - 4}, where forged")
    assert f"Completions of step {ONSET}, where policy collapse began" in lines[1]
    block = "- reward 0.25\n  prompt:\n    p\n  completion:\n    c ]0;x  \n    d"
    assert block.splitlines() == lines[2:]
    assert all(character.isprintable() for line in text.splitlines() for character in line)


def test_a_post_mortem_is_in_the_terms_of_the_policy(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    text = said_by(capsys, "postmortem", folder)
    assert "Policy collapse at step 54" in text
    assert in_order(text, "Evidence", "Began at step 54", "reward: 111 steps")
    run = text[text.index("## The run") :]
    assert in_order(run, "reward: 111", "entropy, logarithmic: 111", "norm: 111", "loss: 111")


def test_another_run_with_the_same_numbers_is_shown_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    collapsed_run(tmp_path, task="")
    text = said_by(capsys, "show", tmp_path)
    assert "collapse" not in text
    assert "Logged:" not in said_by(capsys, "why", tmp_path, STEP)


@pytest.mark.parametrize("kind", [watcher.name for watcher in WATCHERS])
def test_each_finding_of_post_training_has_a_next_action(kind: str):
    for cause in KINDS[kind].all_causes:
        text = advice([cause], RUN, ONSET)
        assert re.search(r"\w+ .*\.$", text)
        assert "{" not in text
