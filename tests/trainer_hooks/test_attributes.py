"""What a run says of itself is kept, whatever it was given."""

import argparse
import enum
import time

import msgspec
import numpy as np
import pytest
import torch

import trainer_hooks
from trainer_hooks.lifecycle import attributes
from trainer_hooks.lifecycle.attributes import flatten_config, run_info
from trainvitals.errors import UsageError
from trainvitals.policy import JudgeConfig
from trainvitals.records import RunInfo


class Angry:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Kind(enum.StrEnum):
    BIG = "big"


def info(**given: object) -> RunInfo:
    plain = {
        "name": "a run",
        "environ": {},
        "mode": "guard",
        "config": {},
        "tags": (),
        "world_size": 1,
        "readback_lag": 1,
        "num_params": 1,
        "run_dir": "/runs/x",
        "judge": JudgeConfig(),
    }
    return run_info(**{**plain, **given})


def loop() -> dict[str, object]:
    config: dict[str, object] = {"lr": 0.1}
    config |= {f"again{i}": config for i in range(10)}
    return config


def test_a_process_began_before_its_first_run_and_later_ones_do_not_know_when(monkeypatch):
    monkeypatch.setattr(attributes, "_timed", set())
    now = time.time_ns()
    started = attributes.process_started_unix_ns(now)
    assert now - 3_600 * 10**9 < started < now
    assert attributes.process_started_unix_ns(now) == 0


def test_a_person_s_session_says_nothing_of_the_run(monkeypatch):
    monkeypatch.setattr(attributes, "_timed", set())
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    assert attributes.process_started_unix_ns(time.time_ns()) == 0


def test_nested_settings_get_dotted_names_and_secrets_are_not_kept():
    config = {"optimizer": {"lr": 0.1, "betas": (0.9, 0.95)}, "wandb": {"api_key": "hush"}}
    expected = {"optimizer.lr": 0.1, "optimizer.betas": "(0.9, 0.95)", "wandb.api_key": "***"}
    assert expected == flatten_config(config)


@pytest.mark.parametrize(
    "config",
    [
        {"surrogate": "\ud800", "\udfff": 1},
        {"odd": [object(), Angry(), b"\xff", {1, 2}], 3: Kind.BIG},
        {"numbers": np.float64(2.5), "whole": np.int64(3), "long": 2**80, "nan": float("nan")},
        {"text": "x" * 3_000_000},
        {f"setting {i}": "y" * 500 for i in range(5_000)},
        loop(),
    ],
    ids=["surrogates", "objects", "numbers", "long text", "many", "a loop"],
)
def test_whatever_the_settings_hold_the_run_keeps_its_name(config):
    said = info(config=config)
    raw = msgspec.msgpack.encode(said)
    assert "a run" == msgspec.msgpack.decode(raw, type=RunInfo).name
    assert len(raw) < 400_000, "an event takes at most half of a journal"
    msgspec.json.encode(said)


def test_names_and_tags_of_any_type_are_text():
    said = info(name=5, tags=[1, None, "\ud800"])
    assert ("5", ("1", "None", "\\ud800")) == (said.name, said.tags)
    assert ("baseline",) == info(tags="baseline").tags


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens_per_step": "12"}, "tokens_per_step is '12'"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0"),
        ({"tokens_per_step": float("nan")}, "tokens_per_step is nan"),
        ({"config": argparse.Namespace(lr=0.1)}, "config is a Namespace"),
    ],
)
def test_an_argument_of_the_wrong_type_is_said_before_the_first_step(given, said):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=said) as caught:
        trainer_hooks.watch(model, optimizer, **given)
    assert caught.value.hint
