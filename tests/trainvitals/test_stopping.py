"""Early stopping: what improves, when patience ends, and that a state goes on as if never left."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainvitals.early_stopping import EarlyStopping, Stopper
from trainvitals.errors import ConfigError

NAN = math.nan
values = st.lists(st.floats() | st.floats(0.0, 2.0), max_size=30)
configs = st.builds(
    EarlyStopping,
    patience=st.integers(1, 5),
    min_delta=st.sampled_from([0.0, 0.1]),
    mode=st.sampled_from(["min", "max"]),
)


def fed(given_values, **config):
    """Return a stopper fed one value a step, and at which steps it improved and would stop."""
    stopper, improved, stops = Stopper(EarlyStopping(**config)), [], []
    for step, value in enumerate(given_values):
        if stopper.update(value, step=step):
            improved.append(step)
        if stopper.should_stop:
            stops.append(step)
    return stopper, improved, stops


@pytest.mark.parametrize(
    ("given_values", "config", "improved", "stops"),
    [
        ([3, 2, 2, 1, 1, 1], {"patience": 2}, [0, 1, 3], [5]),
        ([1, 2, 2, 3], {"patience": 1, "mode": "max"}, [0, 1, 3], [2]),
        ([3, 2.6, 2.5, 2.1], {"patience": 9, "min_delta": 0.5}, [0, 2], []),
        ([1, 1.25, 1.5], {"patience": 9, "min_delta": 0.5, "mode": "max"}, [0, 2], []),
        ([-1, -2], {}, [0, 1], []),
    ],
)
def test_a_value_improves_by_the_delta_and_patience_counts_those_in_a_row_that_do_not(
    given_values, config, improved, stops
):
    assert (improved, stops) == fed(given_values, **config)[1:]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_improves_and_never_becomes_the_best(mode, bad):
    stopper, improved, stops = fed([bad, 1.0, bad, bad], patience=2, mode=mode)
    assert ([1], [3], 1.0) == (improved, stops, stopper.best)


def test_a_run_that_never_had_a_finite_value_ends_as_well_and_says_so():
    stopper, _, stops = fed([NAN] * 3, patience=3)
    assert [2] == stops
    assert "loss had no finite value in 3 evaluations" in stopper.why(NAN, step=2)


def test_why_it_ends_is_said_with_its_numbers():
    stopper, _, _ = fed([0.5, 0.49, 0.55], patience=2, min_delta=0.1, metric="error")
    expected = (
        "error was best at step 0 (0.5) and has not improved by 0.1 in 2 evaluations (patience 2, "
        "mode min); it is 0.55 at step 2: the run ends"
    )
    assert expected == stopper.why(0.55, step=2)


@given(config=configs, before=values, after=values)
def test_restoring_state_changes_nothing(config, before, after):
    kept, restored = Stopper(config), Stopper(config)
    for step, value in enumerate(before):
        kept.update(value, step=step)
    restored.update(7.0, step=7)  # what it was before is gone
    restored.load_state_dict(json.loads(json.dumps(kept.state_dict(), allow_nan=False)))
    for step, value in enumerate(after, len(before)):
        assert kept.update(value, step=step) == restored.update(value, step=step)
        assert kept.should_stop == restored.should_stop
    assert kept.state_dict() == restored.state_dict()


@given(config=configs, given_values=values)
def test_the_best_is_never_worse_than_any_value_by_more_than_the_delta(config, given_values):
    stopper = Stopper(config)
    for step, value in enumerate(given_values):
        stopper.update(value, step=step)
    sign = 1.0 if config.mode == "min" else -1.0
    for value in filter(math.isfinite, given_values):
        assert sign * stopper.best <= sign * value + config.min_delta + 1e-9 * abs(value)


@pytest.mark.parametrize("other", [{"metric": "accuracy"}, {"mode": "max"}])
def test_the_state_of_another_metric_is_left_out(other):
    stopper = Stopper(EarlyStopping(**other))
    stopper.load_state_dict(fed([3.0, 4.0])[0].state_dict())
    assert (None, 0) == (stopper.best, stopper.num_without)


@pytest.mark.parametrize("nothing", [None, {}])
def test_without_a_state_it_begins_anew(nothing):
    stopper = fed([3.0, 4.0])[0]
    stopper.load_state_dict(nothing)
    assert Stopper(EarlyStopping()).state_dict() == stopper.state_dict()


def test_who_raises_the_patience_trains_on():
    stopper = Stopper(EarlyStopping(patience=3))
    stopper.load_state_dict(fed([1.0, 2.0, 2.0], patience=2)[0].state_dict())
    assert not stopper.should_stop


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("metric", ""),
        ("metric", 3),
        ("patience", 0),
        ("patience", 2.5),
        ("patience", None),
        ("min_delta", -0.1),
        ("min_delta", NAN),
        ("min_delta", math.inf),
        ("min_delta", "0"),
        ("mode", "lower"),
        ("mode", None),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_value(key, value):
    with pytest.raises(ConfigError, match=f"early_stopping.{key} is {value!r}"):
        EarlyStopping(**{key: value})
