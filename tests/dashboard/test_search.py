"""Finding runs by words and fields."""

import math

import pytest

from tests.dashboard import samples
from trainvitals.errors import UsageError
from vitals_dashboard import search

RUNS = (
    samples.summary(
        1, name="Alpha run", tags=("x", "ddp"), project="demo", loss=2.5, last_step=900
    ),
    samples.summary(2, name="beta", user="Eve", state="lost", health="critical", loss=math.nan),
    samples.summary(3, name="exp:7", project="other", loss=None, tags=(), num_skips=0),
)
CONFIGS = {
    samples.run_id(1): {"lr": 1e-3, "optimizer": "AdamW"},
    samples.run_id(2): {"lr": 1e-4, "optimizer": "sgd", "ema": True},
}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", [1, 2, 3]),
        ("ALPHA", [1]),
        ("eve", [2]),
        (samples.run_id(2), [2]),
        ("gamma", []),
        ("alpha demo", [1]),
        ("project:demo", [1, 2]),
        ("project:demo user:ada", [1]),
        ("tag:ddp", [1, 2]),
        ('name:"alpha run"', [1]),
        ('"exp:7"', [3]),
        ("health:critical", [2]),
        ("state:lost", [2]),
        ("step>420", [1]),
        ("step>=420", [1, 2, 3]),
        ("step:900", [1]),
        ("loss<3", [1]),
        ("loss:nan", [2]),
        ("skips=0", [3]),
        ("STEP>1_00", [1, 2, 3]),
        ("config.lr<1e-3", [2]),
        ("config.lr<=1e-3", [1, 2]),
        ("config.optimizer:adam", [1]),
        ("config.ema:true", [2]),
        ("config.nothing:1", []),
        ("config.optimizer>1", []),
    ],
)
def test_words_and_fields_all_hold(text: str, numbers: list[int]) -> None:
    asked = search.parse_run_search(text)
    found = [run for run in RUNS if asked.matches(run, CONFIGS.get(run.run_id, {}))]
    assert [samples.run_id(number) for number in numbers] == [run.run_id for run in found]
    assert asked.needs_configs == text.startswith("config.")


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("projct:demo", "there is no field 'projct'", "did you mean project?"),
        ("http://x", "there is no field 'http'", "goes in quotes"),
        ("step>many", "step is compared with 'many'", "step>1000"),
        ("state:ill", "state is never 'ill'", "running, finished, halted"),
        ("name>x", "name is a text", "name:x"),
        ("user:", "user: has no value", "give one"),
        ('name:"a', "a quote has no end", "close it"),
    ],
)
def test_what_is_not_understood_is_said_with_the_way_out(text: str, words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        search.parse_run_search(text)
    assert hint in caught.value.hint


def test_a_run_stands_below_each_of_its_tags_and_what_has_no_value_comes_last() -> None:
    assert [("ddp", [1, 2]), ("guarded", [2]), ("x", [1]), ("", [3])] == [
        (value, [int(run.run_id[-1]) for run in runs])
        for value, runs in search.grouped(RUNS, "tag", {})
    ]
    by_rate = search.grouped(RUNS, search.check_group("config.lr"), CONFIGS)
    assert ["0.0001", "0.001", ""] == [value for value, _ in by_rate]


@pytest.mark.parametrize("by", ["size", "config.", "loss"])
def test_what_runs_cannot_be_grouped_by_is_refused(by: str) -> None:
    with pytest.raises(UsageError, match="cannot be grouped by"):
        search.check_group(by)
