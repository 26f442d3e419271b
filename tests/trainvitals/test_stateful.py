"""State as JSON types: what is saved is a format, and what is restored is of the kind it was."""

import json
from collections import deque
from typing import Any

import pytest

from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.outliers import RobustWindow
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.policy import Judge
from trainvitals.stateful import Stateful, StatefulRow, state_hexadecimal, state_row, state_table


class Part(StatefulRow):
    STATE = ("num", "is_on")

    def __init__(self, num: int = 0) -> None:
        self.num, self.is_on = num, False


class Whole(Stateful):
    STATE = (
        "_newest", "_window", "_groups", "_seen", "_pair", "_part", "_best",
        state_row("flags", "_is_on", "_is_off"),
        state_table("_parts", lambda _: Part()),
        state_table("_counts", num_keys=2),
        state_hexadecimal("_bits"),
    )  # fmt: skip

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=3)
        self._window = RobustWindow(4)
        self._groups: list[list[float]] = []
        self._seen: set[int] = set()
        self._pair = (0.0, 0.0)
        self._part = Part()
        self._best: float | None = None
        self._is_on = self._is_off = False
        self._parts: dict[str, Part] = {}
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}
        self._bits = 0


def filled() -> Whole:
    whole = Whole()
    whole._newest.extend([1.0, 2.0, 3.0, 4.0])
    whole._window.push(2.5)
    whole._groups = [[1.0, 2.0]]
    whole._seen, whole._pair, whole._best = {3, 1}, (1.0, 2.0), 0.5
    whole._part.num = 7
    whole._is_on = True
    whole._parts["a"] = Part(3)
    whole._counts["node", "gpu"] = (4, 5)
    whole._bits = 1 << 99 | 1
    return whole


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


def test_a_key_is_the_attribute_without_its_underscore_and_values_are_json() -> None:
    assert {
        "newest": [2.0, 3.0, 4.0],
        "window": [2.5],
        "groups": [[1.0, 2.0]],
        "seen": [1, 3],
        "pair": [1.0, 2.0],
        "part": [7, 0],
        "best": 0.5,
        "flags": [True, False],
        "parts": [["a", 3, 0]],
        "counts": [["node", "gpu", 4, 5]],
        "bits": "8000000000000000000000001",
    } == filled().state_dict()


def test_what_is_restored_is_of_the_kind_that_was_saved_with_its_bounds() -> None:
    whole = Whole()
    whole.load_state_dict(through_json(filled().state_dict()))
    assert filled().state_dict() == whole.state_dict()
    assert (whole._newest.maxlen, whole._seen, whole._pair) == (3, {1, 3}, (1.0, 2.0))
    assert (whole._is_on, whole._is_off, whole._part.is_on) == (True, False, False)
    assert isinstance(whole._parts["a"], Part)
    assert {("node", "gpu"): (4, 5)} == whole._counts


def test_a_state_shares_nothing_with_the_one_it_is_of() -> None:
    whole, other = filled(), Whole()
    state = whole.state_dict()
    other.load_state_dict(state)
    whole._groups[0].append(9.0)
    other._groups[0].append(8.0)
    assert [[1.0, 2.0]] == state["groups"]


def test_a_key_that_is_missing_is_an_error_unless_an_older_state_may_lack_it() -> None:
    state = filled().state_dict()
    del state["best"]
    with pytest.raises(KeyError, match="best"):
        Whole().load_state_dict(state)

    class Lenient(Whole):
        MAY_LACK = True

    lenient = Lenient()
    lenient.load_state_dict(state)
    assert (lenient._best, lenient._pair) == (None, (1.0, 2.0))


@pytest.mark.parametrize(
    "damage",
    [
        {"best": "x"},
        {"newest": ["x"]},
        {"groups": [["x"]]},
        {"pair": 7},
        {"part": [1]},
        {"flags": [True]},
        {"counts": [["node", "gpu", "x", 5]]},
        {"bits": "no"},
    ],
)
def test_a_damaged_state_is_refused_while_it_is_loaded(damage: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Whole().load_state_dict({**filled().state_dict(), **damage})


def test_a_class_adds_its_attributes_to_those_of_its_base() -> None:
    class More(Whole):
        STATE = ("_extra",)
        FLAGS_ARE_NUMBERS = True

        def __init__(self) -> None:
            super().__init__()
            self._extra = [True, False]

    state = More().state_dict()
    assert [*filled().state_dict(), "extra"] == list(state)
    assert (state["flags"], state["extra"]) == ([0, 0], [1, 0])
    restored = More()
    restored.load_state_dict(state)
    assert [True, False] == restored._extra


# Keys follow the names of attributes, and checkpoints and stores hold them: whoever renames one
# finds it out here, not in a run that cannot be resumed.

IN_CHECKPOINTS = {
    "nonfinite": "overflows",
    "guard": "unmeasured zero",
    "loss_spike": (
        "deviations course suspended clock groups begins rises newest recurring_told "
        "accepted farthest wandered highest computed evidence counts told held"
    ),
    "grad_norm_spike": (
        "deviations course suspended clock groups begins rises newest recurring_told "
        "accepted farthest wandered highest computed evidence counts told held"
    ),
    "grad_norm_burst": "window deviations course bursts clock held sum onset told huge",
    "loss_level": (
        "losses steps noise seen first best onset low num_told is_far at_once silent top "
        "recovered since looks"
    ),
    "loss_drift": (
        "block begin blocks begins differences moves num lowest peaks wandered told known first"
    ),
    "loss_progress": (
        "losses before suspended seen start first best lowest learning rate lost num_lost "
        "collapsed repeats known is_set_back set_back"
    ),
    "outlier": "loss grad_norm suspended",
}

IN_STORES = {
    "learning_rate": (
        "place steps rates last peak rows_since_peak flags zeros is_decayed episodes climb"
    ),
    "weight_decay": "place last highest rows_since_highest is_resumed episode",
    "loss_scale": "place scale count bits rows before episodes",
    "layer_gradient": "place courses episode",
    "update_ratio": "place courses episode",
    "weight_norm": "place logarithms episode",
    "activation": "place courses dead episode collapse",
    "throughput": "place pace measures block blocks best noise low_blocks episode costs steps "
    "reported",
    "data_bound": "place waits durations of_rank start episode usual stalled stall_episode "
    "num_stalled",
    "straggler": "place window optimizer since told",
    "memory_creep": "place total settling scales creeps episode",
    "rank_loss": "place counts told",
    "reduction": "place episode",
    "gpu_throttle": "gpus",
    "gpu_error": "gpus",
    "gpu_lost": "missing",
}


OF_SCALARS = {
    "policy_collapse": "place episode beyond_since entropy reward cut num_before repeats",
    "dead_reward": "place episode beyond_since share reward constant num_constant is_constant "
    "constant_since",
    "kl_runaway": "place episode beyond_since recent first at_best reward milestones",
    "truncation": "place episode beyond_since cut reward",
    "reward_hacking": "place episode beyond_since reward held_out first best num_below num_since "
    "reward_at_best milestones",
    "reward_jump": "place episode beyond_since values steps",
    "policy_ratio": "place episode beyond_since clipped ratio",
    "sampler_gap": "place episode beyond_since gap",
    "preference": "place episode beyond_since chosen rejected rewards accuracies first first_at "
    "early first_step num_pairs is_start_judged is_leaked",
    "overconfidence": "place episode beyond_since margins accuracies accuracy loss num_worse",
    "memorized": "place episode beyond_since recent evaluated best best_step before ahead_of drops "
    "last_epoch start start_at is_start_judged is_known",
    "forgetting": "place episode beyond_since recent first first_step num is_judged",
    "labels": "place episode beyond_since reported",
    "adapter": "place episode beyond_since reported",
}


def test_the_keys_of_what_checkpoints_hold_do_not_change() -> None:
    state = Judge().detector_state()
    assert IN_CHECKPOINTS.keys() | {"suspended", "known_rate"} == state.keys()
    assert IN_CHECKPOINTS == {name: " ".join(state[name]) for name in IN_CHECKPOINTS}
    assert ["window", "first", "limit", "age"] == list(state["outlier"]["loss"])


def test_the_keys_of_the_detectors_over_scalars_do_not_change() -> None:
    states = [
        PostTrainingDetectors(task).state_dict()["watchers"] for task in ("grpo", "dpo", "sft")
    ]
    kept = {name: " ".join(state) for of_task in states for name, state in of_task.items()}
    assert OF_SCALARS == kept


def test_what_a_store_of_an_earlier_version_lacks_begins_anew() -> None:
    state = FleetDetectors().state_dict()
    of_now = dict(state["watchers"]["activation"])
    del state["watchers"]["activation"]["collapse"]
    del state["watchers"]["activation"]["dead"]
    later = FleetDetectors()
    later.load_state_dict(state)
    assert of_now == later.state_dict()["watchers"]["activation"]


def test_scalars_of_an_earlier_version_lack_the_onset_and_keep_the_rest() -> None:
    detectors = PostTrainingDetectors("grpo")
    for step in range(60):
        values = {"entropy": 1.0 if step < 40 else 0.01, "reward": 0.01 * step, "kl": 0.01 * step}
        detectors.update(values, step=step, attempt=1, time_unix_ns=step)
    state = detectors.state_dict()
    for watcher in state["watchers"].values():
        del watcher["beyond_since"]
        if "reward" in watcher:
            del watcher["reward"]["best_step"]
    later = PostTrainingDetectors("grpo")
    later.load_state_dict(state)
    collapse = later.state_dict()["watchers"]["policy_collapse"]
    assert (None, 0) == (collapse["beyond_since"], collapse["reward"]["best_step"])
    assert state["watchers"]["policy_collapse"]["entropy"] == collapse["entropy"]
    assert state["watchers"]["policy_collapse"]["reward"].items() <= collapse["reward"].items()


def test_the_keys_of_what_the_collector_stores_do_not_change() -> None:
    state = FleetDetectors().state_dict()
    assert ["watchers", "last", "told", "checkpoints"] == list(state)
    assert IN_STORES == {name: " ".join(kept) for name, kept in state["watchers"].items()}
    pace = state["watchers"]["throughput"]["pace"]
    assert ["usual", "slow", "streak", "longest", "period"] == list(pace)
