import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts
from tests.dashboard.look_back import with_look_back
from tests.dashboard.stub import Stub

Open = Callable[..., AppTest]


def drawn(app: AppTest) -> dict[str, Any]:
    """Return the charts of a page by their titles."""
    specs = [json.loads(e.proto.spec) for e in app.get("echarts_chart")]
    return {spec["title"][0]["text"]: spec for spec in specs}


def named(spec: Any, name: str) -> Any:
    return next(series for series in spec["series"] if series["name"] == name)


def shown(app: AppTest) -> str:
    """Return what the page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)


def test_the_run_page_shows_numbers_ledger_checkpoints_and_attempts(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    said = shown(app)
    assert "bytes-gpt-1" in said and samples.run_id(1) in said
    values = {metric.label: metric.value for metric in app.metric}
    assert "2.41" == values["Loss"]
    assert "420" == values["Step"]
    decisions, checkpoints, attempts = (table.value for table in app.dataframe)
    assert [262, 181, 180, 120] == list(decisions["Step"])
    assert "gradients of rank 1 are NaN" == decisions["Reason"][3]
    assert {"healthy", "candidate"} == {state.split()[-1] for state in checkpoints["State"]}
    assert [2, 1] == list(attempts["Attempt"])


def test_a_rising_loss_is_marked_as_the_bad_direction(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    loss = next(metric for metric in app.metric if metric.label == "Loss")
    assert loss.delta.startswith("+")
    assert loss.proto.color == loss.proto.MetricColor.RED


def test_a_run_that_ends_with_nan_shows_no_way_that_its_loss_took(
    stub: Stub, open_page: Open
) -> None:
    run = samples.diverged_run()
    stub.add(run)
    app = open_page("run")
    shown(app)
    loss, norm = (
        next(m for m in app.metric if m.label == label) for label in ("Loss", "Grad norm")
    )
    assert ("nan", "", "inf") == (loss.value, loss.delta, norm.value)
    assert "nan" == app.dataframe[0].value["Value"][0]


def test_a_run_without_gpu_shows_the_host_and_says_so(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    assert "No GPU reports for this run; the host is shown." in shown(app)
    assert "n/a" == {metric.label: metric.value for metric in app.metric}["MFU"]


def test_a_run_with_a_gpu_shows_it(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run(with_gpu=True))
    app = open_page("run")
    assert "No GPU" not in shown(app)
    assert {metric.label: metric.value for metric in app.metric}["MFU"].endswith(" %")


def test_a_range_of_steps_gets_the_samples_of_its_time_and_a_short_one_those_of_a_minute(
    stub: Stub, open_page: Open
) -> None:
    sample = samples.sample_run(with_gpu=True)
    for (metric, _, _), reply in sample.series.items():
        if metric.startswith("gpu."):  # as a real one's: the whole is thinned, a part is not
            sample.series[metric, reply.source, "lineage"] = msgspec.structs.replace(
                reply, step=(-1,) * len(reply.step), num_total=90_000
            )
    stub.add(sample)
    whole = drawn(open_page("run", live="false"))
    assert "200 of 90,000 points" == whole["GPU power, W"]["title"][1]["text"]
    loss = sample.series["steps.loss", "rank:0", "lineage"].time_unix_ns
    for first, last, num in ((230, 410, 181), (400, 410, 75)):
        where = {"from": str(first), "to": str(last), "discarded": "false"}
        app = open_page("run", window="range", live="false", **where)
        shown(app)
        power = drawn(app)["GPU power, W"]
        assert f"{num} of {num} points" == power["title"][1]["text"]
        begin, end = loss[first] / 1e6, loss[last] / 1e6
        missing = max(0.0, 60_000 - (end - begin)) / 2
        ends = (begin - missing, end + missing)
        assert ends == pytest.approx((power["xAxis"]["min"], power["xAxis"]["max"]))
        assert all(ends[0] <= x <= ends[1] for x, _ in power["series"][0]["data"])
    assert "trained more than once" not in shown(app)
    app.toggle(key="discarded").set_value(True).run()
    assert "trained more than once" not in shown(app), "none of those that are shown"
    app = open_page("run", window="range", live="false", **{"from": "230", "to": "240"})
    assert "Some of these steps were trained more than once" in shown(app)


def test_a_range_before_any_agent_came_says_that_there_is_no_sample(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run(with_gpu=True))
    where = {"from": "0", "to": "10", "discarded": "false"}
    app = open_page("run", window="range", live="false", **where)
    assert "No sample of a GPU was taken during these steps." in shown(app)


def test_a_run_that_has_only_started_is_a_normal_case(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    line = msgspec.structs.replace(
        sample.summary, last_step=-1, loss=None, grad_norm=None, num_attempts=0, num_firing_alerts=0
    )
    sample.summary = line
    sample.detail = msgspec.structs.replace(
        sample.detail, summary=line, metrics=(), sources=(), attempts=()
    )
    sample.series, sample.decisions, sample.checkpoints = {}, [], []
    stub.add(sample)
    said = shown(open_page("run"))
    assert "No step has been recorded yet" in said
    assert "Vitals took no action." in said


def test_the_address_chooses_the_run_and_its_controls(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.runs.append(samples.summary(0, name="newer"))
    app = open_page("run", run=samples.run_id(1), window="last 200", log="true", live="false")
    assert "bytes-gpt-1" in shown(app)
    assert {"live": False, "log": True} == {
        toggle.key: toggle.value for toggle in app.toggle if toggle.key in ("live", "log")
    }
    assert "last 200" == app.session_state["window"]


def test_an_address_with_an_unknown_run_says_so(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    assert "Run not found" in shown(open_page("run", run="01K0000000000000000000NONE"))


def test_what_a_run_is_called_in_the_choice_does_not_change_with_its_state(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    for page, kind in (("run", "selectbox"), ("compare", "multiselect")):
        app, called = open_page(page, run=samples.run_id(1)), []
        for state in ("running", "lost"):  # a browser names its choice by these very words
            stub.runs[0] = msgspec.structs.replace(stub.runs[0], state=state)
            shown(app.run())
            called.append(app.get(kind)[0].options)
        assert called[0] == called[1] and samples.run_id(1)[-6:] in called[0][0], page


def test_choosing_another_run_changes_the_address(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    other = samples.sample_run(name="second")
    other.summary = msgspec.structs.replace(other.summary, run_id=samples.run_id(2))
    other.detail = msgspec.structs.replace(other.detail, summary=other.summary)
    stub.add(other)
    app = open_page("run", run=samples.run_id(1))
    choice = next(box for box in app.selectbox if box.label == "Run")
    choice.set_value(samples.run_id(2)).run()
    assert "second" in shown(app)
    assert samples.run_id(2) == app.query_params["run"]


def test_every_control_is_in_the_address(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    add = lambda name, values: sample.series.__setitem__(  # noqa: E731
        (name, "rank:0", "lineage"), samples.series(name, "rank:0", values)
    )
    add("steps.grad_norm_clipped", [0.5] * samples.LAST)
    add("steps.tokens_seen", [step * 1e7 for step in range(samples.LAST)])
    add("scalars.val/<b>acc</b>", [0.5] * samples.LAST)
    metrics = tuple(sorted({metric for metric, _, _ in sample.series}))
    sample.detail = msgspec.structs.replace(sample.detail, metrics=metrics)
    stub.add(sample)
    app = open_page("run", run=samples.run_id(1), window="range", **{"from": "100", "to": "200"},
        x="tokens", smooth="0.9", also="scalars.val/<b>acc</b>", discarded="false", live="false",
    )  # fmt: skip
    shown(app)
    charts = drawn(app)
    loss = charts["Loss"]
    assert "101 of 101 points; smoothed" in loss["title"][1]["text"]
    assert "billion tokens" == loss["title"][2]["text"]
    assert (1.0, 2.0) == (loss["xAxis"]["min"], loss["xAxis"]["max"])
    assert {"loss", "loss, smoothed"} <= {series["name"] for series in loss["series"]}
    assert "rolled back" not in {series["name"] for series in loss["series"]}
    assert "brush" in loss, "it stands still, so a range can be dragged"
    assert {"raw", "clipped"} <= {s["name"] for s in charts["Gradient norm (log)"]["series"]}
    assert "val/<b>acc</b>" in charts, "as text, which a chart never takes as HTML"
    ((place, height, _),) = named(loss, "non-finite")["data"]
    assert 1.2 == pytest.approx(place) and height < 0


def test_a_range_that_holds_nothing_and_one_that_is_no_number_are_said_or_left_out(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    beyond = {"from": "900", "to": "1000"}
    app = open_page("run", run=samples.run_id(1), window="range", **beyond)
    assert "No step of this run is between 900 and 1,000; its last one is 420." in shown(app)
    wrong = {"from": "<script>", "to": "9" * 40}
    app = open_page("run", run=samples.run_id(1), window="range", x="nonsense", smooth="7", **wrong)
    shown(app)
    assert "420 of 420 points" == drawn(app)["Loss"]["title"][1]["text"]


def test_going_to_a_decision_shows_the_steps_around_it_and_says_so_in_the_address(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run", run=samples.run_id(1), live="false")
    app.selectbox(key="around").set_value(4).run()
    shown(app)
    extent = [max(0, samples.FORK - 100), samples.STORM + 2 + 100]
    assert extent == [int(app.query_params[name]) for name in ("from", "to")]
    axis = drawn(app)["Loss"]["xAxis"]
    assert extent == [axis["min"], axis["max"]]
    assert "range" == app.session_state["window"]


def test_along_tokens_a_run_that_counts_none_says_so_and_shows_steps(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run", run=samples.run_id(1), x="tokens")
    assert "This run has no tokens to draw along; steps are shown." in shown(app)
    assert "step" == drawn(app)["Loss"]["title"][2]["text"]


def test_a_note_needs_a_control_token_and_is_on_the_curve_at_once(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    assert "note_text" not in [box.key for box in open_page("run").text_input]
    app = open_page("run", control=True, run=samples.run_id(1))
    app.number_input(key="note_step").set_value(42)
    app.text_input(key="note_text").set_value(samples.HOSTILE)
    app.text_input(key="note_by").set_value("ada")
    next(button for button in app.button if button.label == "Add the note").click().run()
    shown(app)
    (kept,) = stub.samples[samples.run_id(1)].annotations
    assert (42, samples.HOSTILE, "ada") == (kept.step, kept.text, kept.by)
    app.run()
    ((step, _, why),) = named(drawn(app)["Loss"], "note")["data"]
    assert 42 == step and why.startswith("step 42, ada: <script>")


def test_rolled_back_branches_are_drawn_of_ranks_and_of_metrics_of_ones_own(
    stub: Stub, open_page: Open
) -> None:
    sample = samples.sample_run()
    of_one = {
        "steps.learning_rate": "Learning rate",
        "steps.tokens_per_second": "Tokens per second",
        "scalars.val": "val",
    }
    split = ("steps.step_duration_seconds", "steps.data_wait_seconds")
    for metric, source in (
        ("steps.rank_loss", "rank:1"), *((name, "rank:0") for name in (*of_one, *split))
    ):  # fmt: skip
        sample.series[metric, source, "lineage"] = samples.series(metric, source, [2.0] * 200)
        sample.series[metric, source, "discarded"] = samples.series(
            metric, source, [3.0, None], steps=[180, 181], attempt=samples.FIRST,
            branch="discarded",
        )  # fmt: skip
    metrics = (*sample.detail.metrics, "scalars.val")
    sample.detail = msgspec.structs.replace(sample.detail, metrics=metrics)
    stub.add(sample)
    app = open_page("run", also="scalars.val")
    shown(app)
    charts = drawn(app)
    left = [named(charts["Loss of each rank"], "rank 1, rolled back")]
    left += [named(charts[title], "rolled back") for title in of_one.values()]
    steps = "Step time, rank 0 (log)"
    parts = [named(charts[steps], f"{name}, rolled back") for name in ("whole", "data")]
    assert [[[180, 3.0], [181, None]]] * 6 == [one["data"] for one in (*left, *parts)]
    own = [named(charts[steps], name)["lineStyle"] for name in ("whole", "data")]
    assert [one["color"] for one in own] == [one["lineStyle"]["color"] for one in parts]
    assert {"opacity"} == {*parts[0]["lineStyle"]} - {*own[0]}, "pale beside its own curve"
    app = open_page("run", also="scalars.val", discarded="false")
    shown(app)
    said = {s["name"] for spec in drawn(app).values() for s in spec["series"]}
    assert set() == {name for name in said if name.endswith("rolled back")}


def test_what_comes_after_the_last_step_is_drawn_too(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    last = sample.summary.last_step + 1
    sample.series["scalars.val", "rank:0", "lineage"] = samples.series(
        "scalars.val", "rank:0", [0.5], steps=[last]
    )
    metrics = (*sample.detail.metrics, "scalars.val")
    sample.detail = msgspec.structs.replace(sample.detail, metrics=metrics)
    stub.add(sample)
    app = open_page("run", also="scalars.val")
    shown(app)
    of_steps = [s for s in drawn(app).values() if s["title"][2]["text"] == "step"]
    assert {last} == {spec["xAxis"]["max"] for spec in of_steps}


def test_a_refresh_is_bounded(stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.add(samples.sample_run(with_gpu=True))
    app = open_page("run")
    whole = sum(len(s["data"]) for c in drawn(app).values() for s in c["series"])
    assert "did not fit" not in shown(app) and whole > 3_000
    monkeypatch.setattr("vitals_dashboard.views.curves.MAX_POINTS", 3_000)
    app = open_page("run")
    assert "did not fit (at most 3,000 points): choose fewer metrics" in shown(app)
    assert 3_000 >= sum(len(s["data"]) for c in drawn(app).values() for s in c["series"])


def test_a_run_that_was_not_heard_of_again_is_not_asked_for_again(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    before = stub.num_series
    shown(app.run())
    assert before == stub.num_series


def test_a_halted_run_says_why_and_the_next_command_above_its_curves(
    stub: Stub, open_page: Open
) -> None:
    sample = with_look_back(samples.sample_run())
    (incident,) = sample.incidents
    verdict = msgspec.structs.replace(
        incident.verdict, next="Fix the cause.", commands=("vitals resume 01K", "vitals why 01K 3")
    )
    sample.incidents = [msgspec.structs.replace(incident, is_open=True, verdict=verdict)]
    stub.add(sample)
    app = open_page("run")
    said = shown(app)
    assert "Rank 3's loss reached 4.9 (limit 3.2) at steps 180 to 181." in said
    assert "Next: Fix the cause." in said
    assert "vitals resume 01K" == app.code[-1].value
    assert "Open incident" in said
    sample.incidents = []
    stub.samples[sample.summary.run_id] = sample
    st.cache_data.clear()
    assert "Running at step 420. No incidents." in shown(app.run())
