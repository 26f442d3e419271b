"""Alarms are scored by the published rules, checked on labels made by hand."""

import pytest

from vitals_bench.detect.scoring import Total, score
from vitals_bench.detect.series import Alarm, Event, Series

pytestmark = pytest.mark.nightly


def log(*events, num=1000, clean=False):
    empty = [None] * num
    return Series(
        name="log", steps=range(num), losses=empty, norms=empty, rates=empty,
        events=events, is_clean=clean,
    )  # fmt: skip


def event(onset, end=None, kind="spike", severity="major"):
    return Event(kind=kind, onset=onset, end=onset if end is None else end, severity=severity)


def alarms(*rows, kind="spike"):
    return [Alarm(row, kind) for row in rows]


def worth(series, said):
    """Return the delays of what was found, the onsets of what was missed, and false alarms."""
    made = score(series, said)
    return [hit.delay for hit in made.hits], [e.onset for e in made.missed], list(made.false)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (498, ([], [500], [])),  # too early to find it, and too near to be false
        (496, ([], [500], [496])),
        (499, ([0], [], [])),
        (500, ([0], [], [])),
        (520, ([20], [], [])),
        (521, ([], [500], [])),
        (530, ([], [500], [])),
        (531, ([], [500], [531])),
    ],
)
def test_an_event_of_one_record_is_found_from_one_before_to_twenty_after(row, expected):
    assert expected == worth(log(event(500)), alarms(row))


def test_a_long_event_is_found_as_long_as_it_lasts():
    assert ([99], [], []) == worth(log(event(500, 599)), alarms(599))


def test_what_is_always_on_finds_nothing_and_is_one_false_alarm():
    assert ([], [500], [0]) == worth(log(event(500)), alarms(*range(1000)))


def test_an_episode_that_began_near_another_event_may_find_this_one():
    both = log(event(500), event(545))
    assert ([0, 0], [], []) == worth(both, alarms(*range(500, 546)))
    far = log(event(500), event(560))
    assert ([], [500, 560], [531]) == worth(far, alarms(*range(531, 561)))


def test_alarms_up_to_twenty_records_apart_are_one_false_alarm():
    assert ([], [], [100]) == worth(log(clean=True), alarms(100, 120, 140))
    assert ([], [], [100, 121]) == worth(log(clean=True), alarms(100, 121))


def test_what_is_said_about_a_minor_event_counts_for_nothing():
    minor = log(event(500, 510, severity="minor"), clean=True)
    assert ([], [], []) == worth(minor, alarms(497, 505, 540))
    assert ([], [], [541]) == worth(minor, alarms(541))


def test_a_plateau_is_found_by_its_kind_alone_which_finds_nothing_else():
    flat = log(event(400, 600, kind="plateau"))
    assert ([50], [], []) == worth(flat, alarms(450, 460, kind="plateau"))
    assert ([], [400], [450]) == worth(flat, alarms(450))
    assert ([], [500], [500]) == worth(log(event(500)), alarms(500, kind="plateau"))


def test_false_plateaus_are_counted_once_in_twenty_records():
    said = alarms(100, 120, 140, 161, kind="plateau")
    assert ([], [], [100, 161]) == worth(log(), said)


def test_records_of_false_alarms_are_counted_each():
    said = alarms(100, 101, 102, 500, 510) + alarms(101, kind="nonfinite")
    made = score(log(event(500)), said)
    assert (3, [100]) == (made.num_false_records, list(made.false))


def test_a_total_puts_it_together():
    scores = [
        score(log(event(500), event(800, kind="divergence")), alarms(504)),
        score(log(clean=True), alarms(10, 200)),
        score(log(clean=True), []),
        score(log(event(300, 500, kind="plateau")), alarms(310, kind="plateau")),
    ]
    total = Total.of(scores)
    assert (2, 4000, 2) == (total.num_events, total.num_records, total.num_false)
    assert (0.5, 1 / 3, 0.4) == (total.recall, total.precision, pytest.approx(total.f1))
    assert (5.0, 10.0, 4.0, (1, 2)) == (
        total.false_per_10k, total.false_records_per_20k, total.delay, total.clean_paged,
    )  # fmt: skip
    assert {"spike": (1, 1), "divergence": (0, 1), "plateau": (1, 1)} == total.kinds()


def test_where_there_is_nothing_there_is_no_figure():
    total = Total.of([score(log(clean=True), [])])
    assert (None, None, None, 0.0) == (total.recall, total.precision, total.delay, total.f1)


def test_a_thinned_log_keeps_what_can_be_seen_of_an_event():
    full = log(event(500), event(505), event(600, 640), num=1000)
    thin = full.thinned(10)
    assert (100, 10) == (len(thin), thin.cadence)
    assert [(50, 50), (60, 64)] == [(e.onset, e.end) for e in thin.events]
    other = full.thinned(10, 5)
    assert [(50, 50), (60, 63)] == [(e.onset, e.end) for e in other.events]
    assert (505, 605) == (other.steps[50], other.steps[60])
    assert [505, 600] == [e.onset for e in full.left(10, 5)]


def test_lost_progress_finds_a_plateau_and_is_judged_as_any_alarm_elsewhere():
    stuck = log(event(500, 700, kind="plateau"))
    assert ([100], [], []) == worth(stuck, alarms(600, kind="lost_progress"))
    assert ([], [500], [100]) == worth(stuck, alarms(100, kind="lost_progress"))
