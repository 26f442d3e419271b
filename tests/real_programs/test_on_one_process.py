"""Well-known training scripts with the guide's lines: exact, healthy and with bad updates."""

import gc
import math
import re
from dataclasses import dataclass

import pytest
import torch

import trainvitals
from tests.real_programs import data
from tests.real_programs.on_ranks import MICRO_STEPS as ON_RANKS
from tests.real_programs.playing import FOLDER, PAGE, Lines, play
from tests.support.examples import one_in
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainvitals.errors import UsageError

NAN_AT, SPIKE_AT = (12, 25), (70, 71)


@dataclass(frozen=True)
class Program:
    """What decides which updates are kept back."""

    micro_steps: int = 1
    has_scaler: bool = False


PROGRAMS = {
    "nanogpt": Program(micro_steps=2, has_scaler=True),
    "mingpt": Program(),
    "word_language_model": Program(),
    "detection": Program(),
    "ppo": Program(),
    "timm_train": Program(micro_steps=2, has_scaler=True),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def watched(name, shm, **faults):
    """Play it with the guide's lines; return the digests, and the steps that were skipped."""
    digests = play(name, watched=True, **faults)
    gc.collect()  # a program that ends has its monitor dropped
    steps = Journal(shm / "shm").steps("skipped")
    return digests, [step for step, skipped in steps.items() if skipped]


def plain(name, bad, left_out):
    """Play it without, but for the updates that are left out."""
    if name == "word_language_model":  # it has no optimizer: an update of 0 is none
        bad = {**bad, **dict.fromkeys(left_out, 0.0)}
    return play(name, watched=False, bad=bad, left_out=frozenset(left_out))


def assert_same(plain, watched):
    different = [name for name, digest in plain.items() if watched[name] != digest]
    assert [] == different
    assert {"log", "random state"} < plain.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_healthy_program_is_bit_for_bit_what_it_was(name, tmp_path):
    ours, skipped = watched(name, tmp_path)
    assert_same(plain(name, {}, ()), ours)
    assert [] == skipped


@pytest.mark.parametrize("name", one_in(3, PROGRAMS))
def test_an_update_with_nan_is_as_if_it_had_been_left_out(name, tmp_path):
    """Under a scaler the plain program leaves it out by itself, and lowers its scale."""
    bad = {update * PROGRAMS[name].micro_steps: math.nan for update in NAN_AT}
    ours, skipped = watched(name, tmp_path, bad=bad)
    left_out = () if PROGRAMS[name].has_scaler else NAN_AT
    assert_same(plain(name, bad, left_out), ours)
    assert list(NAN_AT) == skipped


@pytest.mark.parametrize("name", one_in(3, reversed(PROGRAMS)))
def test_two_spikes_in_a_row_are_withheld_as_the_guide_says(name, tmp_path):
    bad = {update * PROGRAMS[name].micro_steps: 1e4 for update in SPIKE_AT}
    ours, skipped = watched(name, tmp_path, bad=bad)
    assert_same(plain(name, bad, SPIKE_AT), ours)
    assert list(SPIKE_AT) == skipped


def test_a_program_that_would_exit_at_nan_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(data.Scenes, "poisoned", frozenset({7}))
    with pytest.raises(SystemExit):
        play("detection", watched=False)
    _, skipped = watched("detection", tmp_path)
    assert 6 == len(skipped)  # once an epoch


def test_an_update_without_an_optimizer_is_refused_with_the_way_out():
    model = torch.nn.Linear(2, 1)
    for given in ((), (model.parameters(),), (list(model.parameters()),)):
        with pytest.raises(UsageError, match="optimizer") as caught:
            trainvitals.watch(model, *given)
        assert "torch.optim.SGD(model.parameters(), lr=lr)" in caught.value.hint


def test_few_lines_are_changed():
    changed = {name: Lines.of(name).num_changed for name in [*PROGRAMS, *ON_RANKS]}
    shown = set(re.findall(r"test: loop (\w+)", PAGE.read_text()))
    own = {"data", "models", "playing", "on_ranks"}
    there = {path.stem for path in FOLDER.glob("*.py")}
    there -= {*own, "__init__", *(name for name in there if name.startswith("test_"))}
    assert shown == changed.keys() == there
    assert {
        "detection": 5,
        "imagenet": 5,
        "litgpt": 8,
        "mingpt": 5,
        "nanogpt": 4,
        "ppo": 6,
        "timm_train": 4,
        "word_language_model": 8,
    } == changed
