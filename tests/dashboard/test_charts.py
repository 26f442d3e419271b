import json

import pytest
from msgspec import structs

from tests.dashboard import samples
from tests.dashboard.samples import FORK, NAN_STEP, decision, sample_run, series
from trainvitals.views import AnnotationView, NonFiniteMark
from vitals_dashboard import charts
from vitals_dashboard.charts import Line
from vitals_dashboard.charts.lines import branches, points
from vitals_dashboard.charts.marks import mark_text
from vitals_dashboard.theme import ACTIONS, DARK, LIGHT


def loss_chart(**how):
    run = sample_run()
    get = lambda metric, branch="lineage": run.series[metric, "rank:0", branch]  # noqa: E731
    lines = [
        Line(name="loss", reply=get("steps.loss")),
        Line(name="limit", reply=get("steps.loss_limit"), role="limit"),
        Line(name="rolled back", reply=get("steps.loss", "discarded"), role="discarded"),
    ]
    return charts.step_chart("Loss", lines, look=LIGHT, decisions=run.decisions, **how)


def named(spec, name):
    return [s for s in spec["series"] if s["name"] == name]


def test_each_decision_is_marked_at_its_step_with_its_reason():
    spec = loss_chart(legend="marks")
    skips, lines = named(spec, "skip")
    assert [120, 180, 181] == [at for at, height in lines["data"] if height == 1]
    assert [120, 180, 181] == [point[0] for point in skips["data"]]
    assert "skip at step 120: gradients of rank 1 are NaN" == skips["data"][0][2]
    rollback, lines = named(spec, "rollback")
    assert [262] == [at for at, height in lines["data"] if height == 1]
    assert rollback["data"][0][2].startswith("rollback to step 230 at step 262: 3 skips")


def test_actions_differ_in_colour_and_in_shape():
    assert len(ACTIONS) == len({look.colour for look in ACTIONS.values()})
    assert len(ACTIONS) == len({look.symbol for look in ACTIONS.values()})


def test_what_was_only_observed_is_said_to_be_so():
    view = decision(1, "skip_step", 5, "loss 9", acted=False)
    assert "skip (observed, not done) at step 5: loss 9" == mark_text(view)


def test_continue_is_not_drawn():
    assert [] == charts.decision_marks([decision(1, "continue", 5, "fine")])


def test_every_non_finite_step_has_a_mark():
    spec = loss_chart()
    (marks,) = named(spec, "non-finite")
    ((step, height, why),) = marks["data"]
    assert (NAN_STEP, f"nan at step {NAN_STEP} (rank:0)") == (step, why)
    assert height < 0, "below the curve, where nothing hides it"
    assert 1 == marks["yAxisIndex"], "marks never stretch the axis of the curve"


def test_a_non_finite_step_says_which_attempt_of_several_it_was():
    def bad(attempt, branch):
        mark = NonFiniteMark(step=4, attempt=attempt, kind="nan")
        values, steps = [1.0, None], [3, 4]
        return series("steps.loss", "rank:0", values, steps=steps, branch=branch, nonfinite=(mark,))

    lines = [
        Line(name="loss", reply=bad(9, "lineage")),
        Line(name="rolled back", reply=bad(7, "discarded"), role="discarded"),
    ]
    how = {"look": DARK, "extent": (0, 4)}
    spec = charts.step_chart("Loss", lines, attempts={7: 1, 9: 2}, **how)
    ((step, _, said),) = named(spec, "non-finite")[0]["data"]
    both = ["nan at step 4 (rank:0, attempt 1, rolled back)", "nan at step 4 (rank:0, attempt 2)"]
    assert (4, "; ".join(both)) == (step, said)
    spec = charts.step_chart("Loss", lines[:1], **how)
    assert "nan at step 4 (rank:0)" == named(spec, "non-finite")[0]["data"][0][2]


def test_a_run_without_one_finite_value_still_shows_its_marks():
    nan = tuple(NonFiniteMark(step=s, attempt=1, kind="+inf") for s in (3, 4))
    reply = series("steps.loss", "rank:0", [None, None], steps=[3, 4], nonfinite=nan)
    spec = charts.step_chart("Loss", [Line(name="loss", reply=reply)], look=DARK, extent=(0, 4))
    (marks,) = named(spec, "non-finite")
    assert [3, 4] == [point[0] for point in marks["data"]]


def test_the_minimum_and_maximum_that_came_are_drawn():
    reply = sample_run().series["steps.loss", "rank:0", "lineage"]
    drawn = [y for _, y in points(reply) if y is not None]
    came = [v for v in reply.value if v is not None]
    assert (min(came), max(came), len(came)) == (min(drawn), max(drawn), len(drawn))


def test_a_non_finite_value_is_a_gap_and_never_bridged():
    (line, *_) = named(loss_chart(), "loss")
    assert (NAN_STEP, None) == line["data"][NAN_STEP]
    assert not line["connectNulls"]


def test_a_lone_point_between_gaps_is_drawn_as_a_dot():
    reply = series("steps.loss", "rank:0", [1.0, None, 2.0, None, None])
    spec = charts.step_chart("Loss", [Line(name="loss", reply=reply)], look=LIGHT)
    _, dots = named(spec, "loss")
    assert [(0, 1.0), (2, 2.0)] == dots["data"]


def test_a_log_axis_leaves_a_gap_where_it_cannot_show_a_value():
    reply = series("steps.grad_norm", "rank:0", [1.0, 0.0, -1.0, 2.0])
    assert [1.0, None, None, 2.0] == [y for _, y in points(reply, log=True)]
    spec = charts.step_chart("Norm", [Line(name="n", reply=reply)], look=LIGHT, log=True)
    assert "log" == spec["yAxis"][0]["type"]


def test_no_line_joins_two_rolled_back_branches():
    reply = series("steps.loss", "rank:0", [1.0, 2.0, 3.0], steps=[FORK - 2, FORK - 1, FORK])
    assert [(FORK - 2, 1.0), (FORK - 1, 2.0), (FORK, None), (FORK, 3.0)] == branches(reply)


def test_limits_and_discarded_branches_are_faint():
    spec = loss_chart()
    for name in ("limit", "rolled back"):
        assert LIGHT.faint == named(spec, name)[0]["lineStyle"]["color"]
    assert "dashed" == named(spec, "limit")[0]["lineStyle"]["type"]


def test_the_chart_says_how_many_of_the_points_are_drawn():
    reply = series("steps.loss", "rank:0", [1.0, 2.0], total=1_000_000)
    spec = charts.step_chart("Loss", [Line(name="loss", reply=reply)], look=LIGHT)
    assert "2 of 1,000,000 points" == spec["title"][1]["text"]


def test_decisions_outside_the_window_are_left_out():
    spec = loss_chart(extent=(150, 200))
    skips, _ = named(spec, "skip")
    assert [180, 181] == [point[0] for point in skips["data"]]
    assert [] == named(spec, "rollback")
    assert (150, 200) == (spec["xAxis"]["min"], spec["xAxis"]["max"])


@pytest.mark.parametrize(
    ("unit", "drawn", "label"),
    [("bytes", 2.0, "Memory, GiB"), ("ratio", 100 * 2**31, "Memory, %"), ("", 2**31, "Memory")],
)
def test_values_are_drawn_in_the_unit_that_people_read(unit, drawn, label):
    reply = series("node.memory_used_bytes", "node:a", [float(2**31)], unit=unit)
    spec = charts.time_chart("Memory", [Line(name="node a", reply=reply)], look=LIGHT)
    assert drawn == spec["series"][0]["data"][0][1]
    assert label == spec["title"][0]["text"]


def test_a_spec_is_strict_json_whatever_the_reason_says():
    run = sample_run()
    run.decisions.append(decision(9, "halt", 300, samples.HOSTILE + "\u2028\x00" + "y" * 900))
    line = Line(name=samples.HOSTILE, reply=run.series["steps.loss", "rank:0", "lineage"])
    spec = charts.step_chart("Loss", [line], look=LIGHT, decisions=run.decisions)
    text = json.dumps(spec, allow_nan=False)
    assert "yyyy" in text
    assert 400 > max(len(point[2]) for point in named(spec, "halt")[0]["data"])
    assert samples.HOSTILE not in spec["title"][0]["text"]


def test_a_smoothed_curve_lies_over_its_own_which_turns_faint():
    raw = series("steps.loss", "rank:0", [4.0, 4.0, None, 8.0])
    mean = series("steps.loss", "rank:0", [4.0, 4.0, None, 6.5])
    lines = [Line(name="loss", reply=raw), Line(name="loss, smoothed", reply=mean, role="mean")]
    spec = charts.step_chart("Loss", lines, look=LIGHT)
    (own, *_), (over, *_) = named(spec, "loss"), named(spec, "loss, smoothed")
    assert [4.0, 4.0, None, 6.5] == [value for _, value in over["data"]]
    assert own["z"] < over["z"] and own["lineStyle"]["opacity"] < 1
    assert own["itemStyle"]["color"] == over["itemStyle"]["color"]
    assert "decisions read only that" in spec["title"][1]["text"]


def test_steps_stand_at_their_time_or_at_their_tokens():
    reply = series("steps.loss", "rank:0", [3.0, 2.0, 1.0], steps=[0, 10, 20])
    tokens = series("steps.tokens_seen", "rank:0", [0.0, 4e9], steps=[0, 20])
    scale = charts.token_scale(tokens)
    assert ("billion tokens", [0.0, 2.0, 4.0]) == (
        scale.unit,
        [x for x, _ in points(reply, scale=scale)],
    )
    assert 10 == scale.step_at(2.0)
    times = charts.time_scale(reply)
    assert [t / 1e6 for t in reply.time_unix_ns] == [x for x, _ in points(reply, scale=times)]
    assert 10 == times.step_at(times.place([10])[0])
    spec = charts.step_chart(
        "Loss", [Line(name="loss", reply=reply)], look=LIGHT, scale=scale, extent=(0, 20),
        decisions=[decision(1, "skip_step", 10, "loss 9")],
    )  # fmt: skip
    assert 2.0 == named(spec, "skip")[0]["data"][0][0]
    assert (0.0, 4.0) == (spec["xAxis"]["min"], spec["xAxis"]["max"])


def test_along_time_an_alert_stands_when_it_was_and_not_when_its_step_was_trained_again():
    times = charts.time_scale(series("steps.loss", "rank:0", [3.0, 2.0], steps=[0, 60]))
    alert = samples.alert()
    (mark,) = charts.alert_marks([alert], times)
    assert (alert.started_unix_ns / 1e6, alert.step) == (mark.place, mark.step)
    (one, *_) = sample_run().checkpoints
    assert one.time_unix_ns / 1e6 == charts.checkpoint_marks([one], times)[0].place
    assert [one.step] == [mark.place for mark in charts.checkpoint_marks([one])]


def test_everything_that_happened_has_a_shape_and_a_row_of_its_own():
    run = sample_run()
    note = AnnotationView(step=60, time_unix_ns=1, text="new data", by="ada")
    others = [
        *charts.alert_marks([samples.alert()]),
        *charts.checkpoint_marks(run.checkpoints),
        *charts.note_marks([note]),
    ]
    spec = loss_chart(others=others, legend="marks")
    kinds = [named(spec, name)[0] for name in ("skip", "alert", "note", "checkpoint", "non-finite")]
    assert 5 == len({kind["symbol"] for kind in kinds})
    assert 5 == len({kind["data"][0][1] for kind in kinds}), "each in a row of its own"
    assert "step 60, ada: new data" == kinds[2]["data"][0][2]
    assert {kind["name"] for kind in kinds} < set(spec["legend"]["data"])


def test_marks_too_close_to_be_told_apart_are_one_that_counts_them():
    steps = range(0, 100_000, 50)
    skips = [decision(s, "skip_step", s, f"why {s}") for s in steps]
    bad = tuple(NonFiniteMark(step=s, attempt=1, kind="nan") for s in steps)
    reply = series("steps.loss", "rank:0", [1.0, 2.0], steps=[0, 99_999], nonfinite=bad)
    reply = structs.replace(reply, num_nonfinite=90_000)
    spec = charts.step_chart(
        "Loss",
        [Line(name="loss", reply=reply)],
        look=LIGHT,
        decisions=skips,
        extent=(0, 99_999),
        legend="marks",
    )
    assert charts.num_points(spec) < 4_000
    (marks,), (heads, _) = named(spec, "non-finite"), named(spec, "skip")
    assert "3 times non-finite, steps 0 to 100; the first: nan at step 0" in marks["data"][0][2]
    assert "the first: skip at step 0: why 0" in heads["data"][0][2]
    assert "2,000 of 90,000 non-finite ones are marked" in spec["title"][1]["text"]


def test_what_a_log_axis_cannot_show_is_counted():
    reply = series("steps.grad_norm", "rank:0", [1.0, 0.0, -1.0, 2.0])
    spec = charts.step_chart("Norm", [Line(name="n", reply=reply)], look=LIGHT, log=True)
    assert "2 at or below 0, which no log axis shows" in spec["title"][1]["text"]


def test_a_text_that_streamlit_would_take_for_code_is_text():
    reply = series("steps.loss", "rank:0", [1.0, 2.0])
    lines = [Line(name="--x_x--alert(1)--x_x--", reply=reply), Line(name="b", reply=reply)]
    spec = charts.runs_chart("--x_x--a--x_x--", lines, look=DARK)
    assert "--x_x--" not in json.dumps(spec)
