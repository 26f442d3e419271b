import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts
from tests.dashboard.drawn import commands, drawn, messages
from tests.dashboard.look_back import with_look_back
from tests.dashboard.stub import Stub
from trainvitals.question import Question
from trainvitals.views import ManySeriesQuestion, RunQuestion, VerdictQuestion
from vitals_dashboard.source import POINTS

Open = Callable[..., AppTest]


def shown(app: AppTest) -> str:
    """Return what the page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)


def test_the_run_page_shows_numbers_ledger_checkpoints_and_attempts(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    parts = ("decisions", "checkpoints", "attempts")
    app = open_page("run", **{f"open_{part}": "true" for part in parts})
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


def test_a_table_is_asked_for_by_a_click(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    shown(app)
    tables = ["Decisions (4)", "Checkpoints and snapshots (3)", "Attempts (2)"]
    assert [*tables, "Where the time went"] == [part.label for part in app.expander]
    assert 0 == len(app.dataframe)


def test_the_run_page_says_where_the_time_went_and_what_it_cost(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run", open_goodput="true")
    said = shown(app)
    assert "Goodput 80.0 %" in said
    (table,) = (table.value for table in app.dataframe)
    assert [("productive", "8 min 0 s", "80.0 %"), ("down", "2 min 0 s", "20.0 %")] == list(
        table.itertuples(index=False, name=None)
    )
    assert "price: 5.00 at 2.5 a GPU-hour" in said
    assert "Nothing is known of rank 7." in said


def test_nothing_that_reads_every_step_is_asked_before_it_is_opened(
    stub: Stub, open_page: Open
) -> None:
    run = samples.sample_run()
    info = msgspec.structs.replace(run.detail.info, total_steps=1_000)
    run.detail = msgspec.structs.replace(run.detail, info=info)
    stub.add(run)
    said = shown(open_page("run"))
    assert "Goodput" not in said
    assert "Final loss" not in said


def test_the_curves_are_asked_for_before_what_a_browser_draws_after_them(
    stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    answer = stub.ask

    def ask(question: Question[Any]) -> object:
        asked.append(question)
        return answer(question)

    monkeypatch.setattr(stub, "ask", ask)
    stub.add(samples.sample_run())
    open_page("run")
    series = [q for q in asked if isinstance(q, ManySeriesQuestion)]
    (verdict,) = [q for q in asked if isinstance(q, VerdictQuestion)]
    assert max(one.points for one in series[0].series) == POINTS
    assert asked.index(series[0]) < asked.index(verdict) < asked.index(series[-1])


def test_a_collector_that_answers_after_seconds_is_not_told_as_down(
    stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = stub.ask

    def ask(question: Question[Any]) -> object:
        if isinstance(question, RunQuestion):
            time.sleep(4.0)
        return answer(question)

    monkeypatch.setattr(stub, "ask", ask)
    stub.add(samples.sample_run())
    assert "Grad norm" in [metric.label for metric in open_page("run").metric]


def test_the_run_page_says_when_the_run_ends_and_at_what_loss(stub: Stub, open_page: Open) -> None:
    run = samples.sample_run()
    stub.add(run)
    opened = shown(open_page("run", open_goodput="true"))
    assert "Final loss" not in opened, "nobody said how many steps are planned"
    info = msgspec.structs.replace(run.detail.info, total_steps=1_000)
    run.detail = msgspec.structs.replace(run.detail, info=info)
    said = shown(open_page("run", open_goodput="true"))
    assert "Z, in 1 h 0 min (50 min 0 s to 1 h 20 min): step 421 of 1,000, 6.2 s each" in said
    assert "Final loss 2.12 (2.02 to 2.18)" in said


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
    app = open_page("run", open_decisions="true")
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
    assert (200, 90_000) == whole["GPU power, W"].counts()
    loss = sample.series["steps.loss", "rank:0", "lineage"].time_unix_ns
    for first, last, num in ((230, 410, 181), (400, 410, 75)):
        where = {"from": str(first), "to": str(last), "discarded": "false"}
        app = open_page("run", window="range", live="false", **where)
        shown(app)
        power = drawn(app)["GPU power, W"]
        assert (num, num) == power.counts()
        begin, end = loss[first] / 1e6, loss[last] / 1e6
        missing = max(0.0, 60_000 - (end - begin)) / 2
        ends = (begin - missing, end + missing)
        assert ends == pytest.approx(power.wire["ends"])
        (name,) = power.names
        assert all(ends[0] <= x <= ends[1] for x, _ in power.curve(name))
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
    app = open_page("run", open_decisions="true")
    said = shown(app)
    assert "No step has been recorded yet" in said
    assert "\N{EN DASH}" == next(metric.value for metric in app.metric if metric.label == "Step")
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
    assert (101, 101) == loss.counts()
    assert "billion tokens" == loss.wire["unit"]
    assert [1.0, 2.0] == loss.wire["ends"]
    assert {"loss", "loss, smoothed"} <= {*loss.names}
    assert "rolled back" not in loss.names
    assert {"raw", "clipped"} <= {*charts["Gradient norm (log)"].names}
    assert "val/<b>acc</b>" in charts, "as text, which a chart never takes as HTML"
    ((place, _),) = loss.marked("non-finite")
    assert 1.2 == pytest.approx(place)


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
    assert (420, 420) == drawn(app)["Loss"].counts()


def test_going_to_a_decision_shows_the_steps_around_it_and_says_so_in_the_address(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run", run=samples.run_id(1), live="false")
    app.selectbox(key="around").set_value(4).run()
    shown(app)
    extent = [max(0, samples.FORK - 100), samples.STORM + 2 + 100]
    assert extent == [int(app.query_params[name]) for name in ("from", "to")]
    assert extent == drawn(app)["Loss"].wire["ends"]
    assert "range" == app.session_state["window"]


def test_along_tokens_a_run_that_counts_none_says_so_and_shows_steps(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run", run=samples.run_id(1), x="tokens")
    assert "This run has no tokens to draw along; steps are shown." in shown(app)
    assert "step" == drawn(app)["Loss"].wire["unit"]


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
    ((kind, step, words, where, num),) = messages(app)[0]["marks"]
    assert ("note", 42, 1, 1) == (kind, step, where, num), (
        "with the loss only, and only what is new"
    )
    assert words.startswith("step 42, ada: <script>")


def test_rolled_back_branches_are_drawn_of_ranks_and_of_metrics_of_ones_own(
    stub: Stub, open_page: Open
) -> None:
    sample = samples.sample_run()
    of_one = {
        "steps.learning_rate": "Learning rate",
        "steps.tokens_per_second": "Tokens per second",
        "scalars.val": "val",
    }
    for metric, source in (("steps.rank_loss", "rank:1"), *((name, "rank:0") for name in of_one)):
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
    left = [charts["Loss of each rank"].curve("rank 1, rolled back")]
    left += [charts[title].curve("rolled back") for title in of_one.values()]
    assert [[(180, 3.0), (181, None)]] * 4 == left
    app = open_page("run", also="scalars.val", discarded="false")
    shown(app)
    names = {name for chart in drawn(app).values() for name in chart.names}
    assert set() == {name for name in names if name.endswith("rolled back")}


def test_the_time_of_a_step_is_drawn_as_parts_below_the_whole(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    parts = {"forward_backward": 2.0, "data_wait": 1.0, "step_duration": 3.5, "checkpoint": 0.5}
    for name, seconds in parts.items():
        metric = f"steps.{name}_seconds"
        sample.series[metric, "rank:0", "lineage"] = samples.series(metric, "rank:0", [seconds] * 9)
    metrics = {*sample.detail.metrics, *(f"steps.{name}_seconds" for name in parts)}
    sample.detail = msgspec.structs.replace(sample.detail, metrics=tuple(metrics))
    stub.add(sample)
    app = open_page("run")
    shown(app)
    wire = drawn(app)["Step time, rank 0"].wire
    assert [("data", "part"), ("compute", "part"), ("whole", "main")] == [
        (name, role) for name, role, _ in wire["curves"]
    ], "from the top; checkpoints are in few steps, and no part"
    assert (3, False) == (len({colour for _, _, colour in wire["curves"]}), wire["log"])


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
    of_steps = [chart.wire for chart in drawn(app).values() if chart.wire["unit"] == "step"]
    assert {last} == {wire["ends"][1] for wire in of_steps}


def num_points(app: AppTest) -> int:
    return sum(len(line["y"]) for chart in drawn(app).values() for line in chart.wire["lines"])


def test_a_page_is_bounded(stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.add(samples.sample_run(with_gpu=True))
    app = open_page("run")
    assert "did not fit" not in shown(app) and num_points(app) > 3_000
    monkeypatch.setattr("vitals_dashboard.feed.MAX_POINTS", 3_000)
    monkeypatch.setattr("vitals_dashboard.views.run.MAX_POINTS", 3_000)
    app = open_page("run")
    assert "did not fit (at most 3,000 points): choose fewer metrics" in shown(app)
    assert num_points(app) <= 3_000


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
    assert "vitals resume 01K" == commands(app)[-1]
    assert "Open incident" in said and "Hung" not in said
    hung = msgspec.structs.replace(verdict, is_hung=True, state="Hung in step 60: ...")
    sample.incidents = [msgspec.structs.replace(sample.incidents[0], verdict=hung)]
    stub.samples[sample.summary.run_id] = sample
    st.cache_data.clear()
    assert "Hung in step 60: ... Rank 3's loss reached 4.9" in shown(app.run())
    sample.incidents = []
    stub.samples[sample.summary.run_id] = sample
    st.cache_data.clear()
    assert "Running at step 420. No incidents." in shown(app.run())


def test_a_run_whose_loop_gives_no_loss_shows_what_it_has(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    without = [m for m in sample.detail.metrics if m not in ("steps.loss", "steps.loss_limit")]
    sample.detail = msgspec.structs.replace(sample.detail, metrics=tuple(without))
    stub.add(sample)
    app = open_page("run")
    charts = drawn(app)
    first = next(iter(charts))
    assert "Gradient norm (log)" == first and "Loss" not in charts
    assert charts[first].marked("skip"), "what happened stands in it"
    assert "No step has been recorded" not in shown(app)


def test_an_open_page_is_sent_only_what_is_new(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run(with_gpu=True)
    stub.add(sample)
    app = open_page("run")
    (whole,) = messages(app)
    (same,) = messages(app.run())
    assert (0, 1) == (whole["base"], whole["number"])
    assert {"key", "name", "number", "base"} == {*same}, "nothing is new"
    assert (1, 1) == (same["base"], same["number"])
    train(stub, sample, num_steps=10)
    (new,) = messages(app.run())
    assert (1, 2) == (new["base"], new["number"])
    steps = list(range(samples.LAST, samples.LAST + 10))
    for chart, line, num_replaced, xs, values, total, _ in new["lines"]:
        name, role, _ = whole["charts"][chart]["curves"][line]
        assert (0, steps, 10) == (num_replaced, new["xs"][xs], len(values)), (name, role)
        assert samples.LAST + 10 == total
    of_steps = [chart for chart in whole["charts"] if chart["unit"] == "step"]
    lines = [curve for chart in of_steps for curve in chart["curves"] if curve[1] != "discarded"]
    assert len(lines) == len(new["lines"]), "of rolled-back branches nothing is new"
    assert len(json.dumps(new)) < 5 * 1024


def test_values_that_came_late_or_changed_are_sent_again_with_all_behind_them(
    stub: Stub, open_page: Open
) -> None:
    sample = samples.sample_run()
    stub.add(sample)
    app = open_page("run", smooth="0.5")
    (whole,) = messages(app)
    key = ("steps.loss", "rank:0", "lineage")
    values = list(sample.series[key].value)
    values[-3] = 9.0
    sample.series[key] = msgspec.structs.replace(sample.series[key], value=tuple(values))
    train(stub, sample, num_steps=1)
    (new,) = messages(app.run())
    lines = {(chart, line): (num, values) for chart, line, num, _, values, *_ in new["lines"]}
    num_replaced, sent = lines[0, 0]
    assert (3, 4, 9.0) == (num_replaced, len(sent), sent[0])
    of_loss = {i for i, (name, *_) in enumerate(whole["charts"][0]["curves"]) if "loss" in name}
    others = [num for (chart, line), (num, _) in lines.items() if chart or line not in of_loss]
    assert len(others) > 8 and not any(others), "the other series are as they were"


def test_a_rollback_sends_the_curves_anew(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    stub.add(sample)
    app = open_page("run")
    again = msgspec.structs.replace(sample.detail.attempts[1], id=samples.SECOND + 1, ordinal=3)
    attempts = (*sample.detail.attempts, again)
    sample.detail = msgspec.structs.replace(sample.detail, attempts=attempts)
    assert 0 == messages(app.run())[0]["base"]


def test_what_the_browser_missed_it_is_sent_whole(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    app.session_state["feed_run"].reset()  # as the component asks for it
    assert 0 == messages(app.run())[0]["base"]


def train(stub: Stub, sample: samples.SampleRun, *, num_steps: int) -> None:
    """Let the run go on: every series of steps has so many more."""
    for key, reply in sample.series.items():
        if reply.branch == "discarded" or not key[0].startswith("steps."):
            continue
        last, times = reply.step[-1], reply.time_unix_ns
        more = range(last + 1, last + 1 + num_steps)
        sample.series[key] = msgspec.structs.replace(
            reply,
            num_total=reply.num_total + num_steps,
            step=(*reply.step, *more),
            time_unix_ns=(*times, *(times[-1] + (i + 1) * 500_000_000 for i in range(num_steps))),
            attempt=(*reply.attempt, *(reply.attempt[-1] for _ in more)),
            value=(*reply.value, *(2.0 + 0.001 * step for step in more)),
        )
    line = msgspec.structs.replace(
        sample.summary, last_seen_unix_ns=sample.summary.last_seen_unix_ns + num_steps
    )
    sample.summary = line
    sample.detail = msgspec.structs.replace(sample.detail, summary=line)
