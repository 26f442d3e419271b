import json

import pytest
from msgspec import structs

from tests.dashboard import samples
from tests.dashboard.samples import FORK, NAN_STEP, decision, sample_run, series
from trainvitals.views import AnnotationView, NonFiniteMark
from vitals_dashboard import charts
from vitals_dashboard.charts import ChartLine
from vitals_dashboard.charts.lines import series_points
from vitals_dashboard.charts.marks import mark_text
from vitals_dashboard.theme import ACTIONS


def loss_chart(**how):
    run = sample_run()
    get = lambda metric, branch="lineage": run.series[metric, "rank:0", branch]  # noqa: E731
    lines = [
        ChartLine(name="loss", reply=get("steps.loss")),
        ChartLine(name="limit", reply=get("steps.loss_limit"), role="limit"),
        ChartLine(name="rolled back", reply=get("steps.loss", "discarded"), role="discarded"),
    ]
    return charts.step_chart("Loss", lines, decisions=run.decisions, **how)


def curve(chart, name):
    (found,) = (each for each in chart.curves if each.name == name)
    return found


def marked(chart, kind):
    return [(mark.place, mark.say()) for mark in chart.marks if mark.look.word == kind]


def test_each_decision_is_marked_at_its_step_with_its_reason():
    chart = loss_chart()
    skips, (rollback,) = marked(chart, "skip"), marked(chart, "rollback")
    assert [120, 180, 181] == [place for place, _ in skips]
    assert "skip at step 120: gradients of rank 1 are NaN" == skips[0][1]
    assert 262 == rollback[0]
    assert rollback[1].startswith("rollback to step 230 at step 262: 3 skips")


def test_a_cut_of_the_learning_rate_is_marked_where_training_goes_on():
    cut = decision(5, "rollback", 262, "3 skips", rollback_to_step=230, lr_factor=0.5)
    skipped = decision(6, "skip_step", 300, "loss 9", acted=False, lr_factor=0.5)
    chart = charts.step_chart(
        "Loss", [ChartLine(name="loss", reply=series("steps.loss", "rank:0", [1.0]))],
        decisions=[cut, skipped],
    )  # fmt: skip
    assert [(230, "learning rate x 0.5 from step 230")] == marked(chart, "LR cut")


def test_actions_differ_in_colour_and_in_shape():
    assert len(ACTIONS) == len({look.colour for look in ACTIONS.values()})
    assert len(ACTIONS) == len({look.symbol for look in ACTIONS.values()})


def test_what_was_only_observed_is_said_to_be_so():
    view = decision(1, "skip_step", 5, "loss 9", acted=False)
    assert "skip (observed, not done) at step 5: loss 9" == mark_text(view)


def test_continue_is_not_drawn():
    assert [] == charts.decision_marks([decision(1, "continue", 5, "fine")])


def test_every_non_finite_step_has_a_mark_below_the_curve_where_nothing_hides_it():
    chart = loss_chart()
    assert [(NAN_STEP, f"nan at step {NAN_STEP} (rank:0)")] == marked(chart, "non-finite")
    assert -1 == next(m for m in chart.marks if m.look.word == "non-finite").look.lane


def test_a_non_finite_step_says_which_attempt_of_several_it_was():
    def bad(attempt, branch):
        mark = NonFiniteMark(step=4, attempt=attempt, kind="nan")
        values, steps = [1.0, None], [3, 4]
        return series("steps.loss", "rank:0", values, steps=steps, branch=branch, nonfinite=(mark,))

    lines = [
        ChartLine(name="loss", reply=bad(9, "lineage")),
        ChartLine(name="rolled back", reply=bad(7, "discarded"), role="discarded"),
    ]
    chart = charts.step_chart("Loss", lines, attempts={7: 1, 9: 2}, extent=(0, 4))
    both = ["nan at step 4 (rank:0, attempt 1, rolled back)", "nan at step 4 (rank:0, attempt 2)"]
    assert [(4, "; ".join(both))] == marked(chart, "non-finite")
    chart = charts.step_chart("Loss", lines[:1], extent=(0, 4))
    assert [(4, "nan at step 4 (rank:0)")] == marked(chart, "non-finite")


def test_a_run_without_one_finite_value_still_shows_its_marks():
    nan = tuple(NonFiniteMark(step=s, attempt=1, kind="+inf") for s in (3, 4))
    reply = series("steps.loss", "rank:0", [None, None], steps=[3, 4], nonfinite=nan)
    chart = charts.step_chart("Loss", [ChartLine(name="loss", reply=reply)], extent=(0, 4))
    assert [3, 4] == [place for place, _ in marked(chart, "non-finite")]


def test_the_minimum_and_maximum_that_came_are_drawn():
    reply = sample_run().series["steps.loss", "rank:0", "lineage"]
    drawn = [y for _, y in series_points(reply) if y is not None]
    came = [v for v in reply.value if v is not None]
    assert (min(came), max(came), len(came)) == (min(drawn), max(drawn), len(drawn))


def test_a_non_finite_value_is_a_gap():
    loss = curve(loss_chart(), "loss")
    assert (NAN_STEP, None) == (loss.x[NAN_STEP], loss.y[NAN_STEP])


def test_a_log_axis_leaves_a_gap_where_it_cannot_show_a_value():
    reply = series("steps.grad_norm", "rank:0", [1.0, 0.0, -1.0, 2.0])
    chart = charts.step_chart("Norm", [ChartLine(name="n", reply=reply)], log=True)
    assert [1.0, None, None, 2.0] == curve(chart, "n").y
    assert chart.log


def test_no_line_joins_two_rolled_back_branches():
    reply = series("steps.loss", "rank:0", [1.0, 2.0, 3.0], steps=[FORK - 2, FORK - 1, FORK])
    line = ChartLine(name="rolled back", reply=reply, role="discarded")
    first, second = charts.step_chart("Loss", [line]).curves
    assert ([FORK - 2, FORK - 1], [1.0, 2.0]) == (first.x, first.y)
    assert ([FORK], [3.0]) == (second.x, second.y)


def test_limits_and_discarded_branches_are_faint_and_told_apart():
    chart = loss_chart()
    assert [("loss", 0), ("limit", -1), ("rolled back", -1)] == [
        (each.name, each.colour) for each in chart.curves
    ]
    assert ["main", "limit", "discarded"] == [each.role for each in chart.curves]


def test_a_mean_lies_over_its_own_curve_in_its_colour():
    raw = series("steps.loss", "rank:0", [4.0, 4.0, None, 8.0])
    mean = series("steps.loss", "rank:0", [4.0, 4.0, None, 6.5])
    other = series("steps.loss_z", "rank:0", [1.0])
    lines = [
        ChartLine(name="z", reply=other),
        ChartLine(name="loss", reply=raw),
        ChartLine(name="loss, smoothed", reply=mean, role="mean"),
    ]
    chart = charts.step_chart("Loss", lines)
    own, over = curve(chart, "loss"), curve(chart, "loss, smoothed")
    assert (1, "mean", [4.0, 4.0, None, 6.5]) == (over.colour, over.role, over.y)
    assert (1, "main", [4.0, 4.0, None, 8.0]) == (own.colour, own.role, own.y)


def test_a_group_is_drawn_as_its_mean_and_a_band_where_all_of_its_runs_have_values():
    def run(values, steps):
        return ChartLine(name="r", reply=series("steps.loss", "rank:0", values, steps=steps))

    seeds = [run([1.0, 3.0, None, 5.0], [0, 10, 15, 20]), run([3.0, 5.0], [10, 30])]
    chart = charts.groups_chart("Loss", [("seed", seeds), ("single", seeds[1:])])
    high, low, mean, single = chart.curves
    assert ["band", "band", "main", "main"] == [each.role for each in chart.curves]
    assert [10, 20] == mean.x == high.x
    assert ([3.0, 5.0], [3.0, 4.0], [3.0, 4.5]) == (high.y, low.y, mean.y)
    assert (0, 0, 0, 1) == tuple(each.colour for each in chart.curves)
    assert ("single", [3.0, 5.0]) == (single.name, single.y)
    assert () == tuple(charts.groups_chart("Loss", [("gap", [run([None], [0])])]).curves)


def test_a_chart_knows_how_many_points_are_stored():
    reply = series("steps.loss", "rank:0", [1.0, 2.0], total=1_000_000)
    chart = charts.step_chart("Loss", [ChartLine(name="loss", reply=reply)])
    assert (2, 1_000_000) == (len(chart.curves[0].x), chart.curves[0].num_total)


def test_decisions_outside_the_window_are_left_out():
    chart = loss_chart(extent=(150, 200))
    assert [180, 181] == [place for place, _ in marked(chart, "skip")]
    assert [] == marked(chart, "rollback")
    assert (150, 200) == chart.ends


@pytest.mark.parametrize(
    ("unit", "drawn", "label"),
    [("bytes", 2.0, "Memory, GiB"), ("ratio", 100 * 2**31, "Memory, %"), ("", 2**31, "Memory")],
)
def test_values_are_drawn_in_the_unit_that_people_read(unit, drawn, label):
    reply = series("node.memory_used_bytes", "node:a", [float(2**31)], unit=unit)
    chart = charts.time_chart("Memory", [ChartLine(name="node a", reply=reply)])
    assert (label, [drawn]) == (chart.title, chart.curves[0].y)


def test_what_people_wrote_is_short_plain_text():
    run = sample_run()
    run.decisions.append(decision(9, "halt", 300, samples.HOSTILE + "\u2028\x00" + "y" * 900))
    line = ChartLine(name=samples.HOSTILE, reply=run.series["steps.loss", "rank:0", "lineage"])
    chart = charts.step_chart(samples.HOSTILE, [line], decisions=run.decisions)
    ((_, words),) = marked(chart, "halt")
    assert "yyyy" in words and len(words) < 400
    assert len(chart.curves[0].name) <= 48
    json.dumps([words, chart.title], allow_nan=False)


def test_steps_stand_at_their_time_or_at_their_tokens():
    reply = series("steps.loss", "rank:0", [3.0, 2.0, 1.0], steps=[0, 10, 20])
    tokens = series("steps.tokens_seen", "rank:0", [0.0, 4e9], steps=[0, 20])
    scale = charts.token_scale(tokens)
    assert ("billion tokens", [0.0, 2.0, 4.0]) == (
        scale.unit,
        [x for x, _ in series_points(reply, scale=scale)],
    )
    assert 10 == scale.step_at(2.0)
    times = charts.time_scale(reply)
    assert [t / 1e6 for t in reply.time_unix_ns] == [
        x for x, _ in series_points(reply, scale=times)
    ]
    assert 10 == times.step_at(times.x_of([10])[0])
    chart = charts.step_chart(
        "Loss", [ChartLine(name="loss", reply=reply)], scale=scale, extent=(0, 20),
        decisions=[decision(1, "skip_step", 10, "loss 9")],
    )  # fmt: skip
    assert [2.0] == [place for place, _ in marked(chart, "skip")]
    assert ((0.0, 4.0), "billion tokens") == (chart.ends, chart.unit)


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
    chart = loss_chart(others=others)
    looks = {mark.look.word: mark.look for mark in chart.marks}
    kinds = [looks[name] for name in ("skip", "alert", "note", "checkpoint", "non-finite")]
    assert 5 == len({kind.symbol for kind in kinds}) == len({kind.lane for kind in kinds})
    assert [(60, "step 60, ada: new data")] == marked(chart, "note")


def test_marks_too_close_to_be_told_apart_are_one_that_counts_them():
    steps = range(0, 100_000, 50)
    skips = [decision(s, "skip_step", s, f"why {s}") for s in steps]
    bad = tuple(NonFiniteMark(step=s, attempt=1, kind="nan") for s in steps)
    reply = series("steps.loss", "rank:0", [1.0, 2.0], steps=[0, 99_999], nonfinite=bad)
    reply = structs.replace(reply, num_nonfinite=90_000)
    lines = [ChartLine(name="loss", reply=reply)]
    chart = charts.step_chart("Loss", lines, decisions=skips, extent=(0, 99_999))
    assert chart.num_points < 4_000
    assert (
        "3 times non-finite, steps 0 to 100; the first: nan at step 0"
        in marked(chart, "non-finite")[0][1]
    )
    assert "the first: skip at step 0: why 0" in marked(chart, "skip")[0][1]
    assert len(steps) == sum(mark.num for mark in chart.marks if mark.look.word == "skip")
    later = charts.step_chart("Loss", lines, decisions=skips, extent=(0, 100_400))
    assert marked(chart, "skip") == marked(later, "skip"), "what a browser has of them stays"
