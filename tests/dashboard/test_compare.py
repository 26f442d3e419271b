from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts
from tests.dashboard.drawn import drawn
from tests.dashboard.samples import SampleRun
from tests.dashboard.stub import Stub, StubServer

Open = Callable[..., AppTest]


def shown(app: AppTest) -> str:
    """Return what the page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)


def other_run(number: int, *, name: str, shift: float, **info: Any) -> SampleRun:
    """A run like the first one, of other values and other settings."""
    run = samples.sample_run(name=name)
    run.summary = msgspec.structs.replace(run.summary, run_id=samples.run_id(number))
    settings = msgspec.structs.replace(run.detail.info, **info)
    run.detail = msgspec.structs.replace(run.detail, summary=run.summary, info=settings)
    run.series = {
        key: msgspec.structs.replace(
            reply, value=tuple(None if v is None else v + shift for v in reply.value)
        )
        for key, reply in run.series.items()
    }
    return run


def runs(*numbers: int) -> str:
    return ",".join(samples.run_id(number) for number in numbers)


def test_two_runs_are_drawn_over_each_other_with_their_difference_and_settings(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run(name="base"))
    config = {"lr": 3e-4, "data.seed": 7}
    stub.add(other_run(2, name="wide", shift=0.5, config=config, world_size=16))
    app = open_page("compare", runs=runs(1, 2))
    shown(app)
    curves, between = drawn(app).values()
    assert ["base", "wide"] == curves.names
    assert (840, 840) == curves.counts()
    assert curves.colour("wide") == between.colour("wide") != curves.colour("base")
    values = [y for _, y in between.curve("wide")]
    assert None in values, "where a run was not finite there is no difference"
    assert {0.5} == {round(y, 9) for y in values if y is not None}
    last, differing = (table.value for table in app.dataframe)
    assert {"config.lr", "config.data.seed", "world size"} == set(differing["Setting"])
    assert ["0.0003"] == list(differing[differing["Setting"] == "config.lr"]["wide"])
    assert "steps.loss, last" in set(last["Value"])
    behind = last.set_index("Value").loc["loss of the first"]
    assert ("", "behind base by 210 steps (2.1 M tokens), at equal loss") == tuple(behind)


def test_a_run_that_ends_with_nan_has_that_as_its_last_value(stub: Stub, open_page: Open) -> None:
    stub.add(samples.diverged_run())
    stub.add(other_run(2, name="wide", shift=0.5))
    app = open_page("compare", runs=runs(1, 2))
    shown(app)
    last = app.dataframe[0].value.set_index("Value").loc["steps.loss, last"]
    assert "nan" == last["diverged"]
    assert 2 < float(last["wide"]) < 4


def test_the_address_names_runs_metric_and_alignment(stub: Stub, open_page: Open) -> None:
    for number, per_step in ((1, 2e6), (2, 4e6)):
        run = other_run(number, name=f"r{number}", shift=0.0)
        tokens = [step * per_step for step in range(samples.LAST)]
        run.series["steps.tokens_seen", "rank:0", "lineage"] = samples.series(
            "steps.tokens_seen", "rank:0", tokens
        )
        metrics = (*run.detail.metrics, "steps.tokens_seen")
        run.detail = msgspec.structs.replace(run.detail, metrics=metrics)
        stub.add(run)
    stub.add(other_run(3, name="r3", shift=0.0))
    app = open_page(
        "compare", runs=runs(1, 2, 3), metric="steps.grad_norm", along="tokens", log="true",
        smooth="0.5", live="false",
    )  # fmt: skip
    assert "Left out (no tokens to draw by): r3" in shown(app)
    curves, _ = drawn(app).values()
    assert (True, "billion tokens") == (curves.wire["log"], curves.wire["unit"])
    assert 2 * curves.curve("r1")[-1][0] == curves.curve("r2")[-1][0], "aligned by tokens"
    assert curves.colour("r2") == curves.colour("r2, smoothed")
    assert "steps.grad_norm" == app.selectbox(key="compared_metric").value


def test_runs_are_compared_by_the_time_since_their_start(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run(name="base"))
    later = other_run(2, name="later", shift=0.5)
    later.series = {
        key: msgspec.structs.replace(
            reply, time_unix_ns=tuple(time + 86_400 * 10**9 for time in reply.time_unix_ns)
        )
        for key, reply in later.series.items()
    }
    stub.add(later)
    app = open_page("compare", runs=runs(1, 2), along="time")
    shown(app)
    curves, between = drawn(app).values()
    assert "hours since the start" == curves.wire["unit"] == between.wire["unit"]
    assert 0 == curves.curve("base")[0][0] == between.curve("later")[0][0]
    assert [x for x, _ in curves.curve("base")] == [x for x, _ in curves.curve("later")]
    assert curves.curve("base")[-1][0] == pytest.approx(between.curve("later")[-1][0], rel=1e-5)
    assert {0.5} == {round(y, 9) for _, y in between.curve("later") if y is not None}


def test_runs_of_a_group_are_a_mean_with_a_band(stub: Stub, open_page: Open) -> None:
    stub.add(other_run(1, name="a", shift=0.0, config={"lr": 0.1}))
    stub.add(other_run(2, name="b", shift=1.0, config={"lr": 0.1}))
    stub.add(other_run(3, name="c", shift=5.0, config={"lr": 0.2}))
    app = open_page("compare", runs=runs(1, 2, 3), mean_by="config.lr")
    shown(app)
    (chart,) = drawn(app).values()
    band = "config.lr: 0.1 (2 runs), lowest to highest"
    assert [band, band, "config.lr: 0.1 (2 runs)", "config.lr: 0.2 (1 run)"] == chart.names
    high, mean = chart.curve(band)[0][1], chart.curve("config.lr: 0.1 (2 runs)")[0][1]
    assert mean == pytest.approx(high - 0.5)
    said = shown(open_page("compare", runs=runs(1, 2), mean_by="nonsense"))
    assert "runs cannot be grouped by 'nonsense'" in said


def test_runs_of_one_name_and_of_hostile_names_stay_apart_and_plain(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run(name=samples.HOSTILE))
    stub.add(other_run(2, name=samples.HOSTILE, shift=1.0))
    stub.add(other_run(3, name="y" * 300, shift=2.0))
    app = open_page("compare", runs=runs(1, 2, 3))
    shown(app)
    names = next(iter(drawn(app).values())).names
    assert 3 == len(set(names)) and all(len(name) <= 48 for name in names)
    as_markup = [str(e.value) for e in (*app.markdown, *app.caption)]
    as_markup += [str(e.proto.body) for e in app.get("html")]
    for piece in ("owned", "onerror", "yyyyyyy", "e.x"):
        assert not any(piece in text for text in as_markup)


def test_choosing_runs_changes_the_address(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run(name="base"))
    stub.add(other_run(2, name="wide", shift=0.5))
    app = open_page("compare")
    assert "Choose two to 6 runs" in shown(app)
    app.multiselect(key="compared").set_value([samples.run_id(2), samples.run_id(1)]).run()
    shown(app)
    assert [samples.run_id(2), samples.run_id(1)] == app.query_params["runs"]
    assert 2 == len(drawn(app))


def test_what_cannot_be_compared_is_said(stub: Stub, open_page: Open) -> None:
    assert "No runs yet" in shown(open_page("compare"))
    stub.add(samples.sample_run(name="base"))
    stub.runs.append(samples.summary(2, name="gone", started_unix_ns=1))
    empty = other_run(3, name="empty", shift=0.0)
    empty.detail = msgspec.structs.replace(empty.detail, metrics=())
    empty.series = {}
    stub.add(empty)
    said = shown(open_page("compare", runs=f"{runs(1, 3)},nowhere<b>"))
    assert "Not here: nowhere<b>" in said
    assert "Left out (no steps.loss): empty" in said
    assert "the collector" not in said
    gone = Stub()
    StubServer(gone).close()
    app = open_page("compare", url=gone.url, runs=runs(1, 3))
    assert "The collector does not answer" in shown(app)
