import pytest
from msgspec import structs

from tests.dashboard import samples
from trainvitals.views import GoodputView, RunSummary
from vitals_dashboard import formatting, tables

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "\u2013"), (2.41234, "2.412"), (420, "420"), (1e-5, "1e-05"), (float("nan"), "nan"),
     (1_234_567.0, "1,234,567"), (12_345.6, "12,346"), (float("inf"), "inf")],
)  # fmt: skip
def test_a_number_has_few_digits_and_missing_is_a_dash(value, text):
    assert text == formatting.number(value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-5, "0 s"), (119, "119 s"), (7_000, "116 min"), (90_000, "25 h"), (1e6, "11 d")],
)
def test_an_age_is_in_the_unit_that_fits(seconds, text):
    now = 10**18
    assert text == formatting.age(now - int(seconds) * SECOND, now)


def test_plain_text_is_one_bounded_line_without_control_or_direction_marks():
    assert "a b <script> c" == formatting.plain("a\n\tb\x00 <script>\u202e c\u200b")
    assert 120 == len(formatting.plain("x" * 10_000))
    assert "" == formatting.plain("\u202e\n")


def test_a_run_without_a_name_is_called_by_its_id():
    assert samples.run_id(3) == formatting.run_label("\u202e ", samples.run_id(3))


def test_attempts_are_told_by_the_numbers_people_give_them():
    rows = tables.attempt_rows(samples.sample_run().detail.attempts)
    assert [(2, 1, 230), (1, None, 0)] == [
        (row["Attempt"], row["Forked from"], row["At step"]) for row in rows
    ]


def test_runs_that_waited_are_told_with_what_it_cost_the_most_expensive_first():
    quiet, late, hung = (
        samples.summary(n, name=name, world_size=8) for n, name in enumerate(("a", "b", "c"))
    )
    views = [
        (quiet, samples.goodput(quiet)),
        (late, with_waits(late, straggler_wait=90)),
        (hung, structs.replace(with_waits(hung, straggler_wait=30, hang=60 * 60), money=None)),
    ]
    rows = tables.waiting_rows(views)
    assert ["c", "b"] == [row["Run"] for row in rows]
    waits = {"Stragglers": "1 min 30 s", "Hangs": "0 ms", "Share": "15.0 %"}
    assert waits | {"Run": "b", "GPU-hours": "0.2", "Price": "0.5"} == rows[1]
    assert ("1 h 0 min", "8.07", "\u2013") == (
        rows[0]["Hangs"], rows[0]["GPU-hours"], rows[0]["Price"],
    )  # fmt: skip


def with_waits(run: RunSummary, **seconds: int) -> GoodputView:
    """Return where ten minutes went, with these waits."""
    waits = {name: value * SECOND for name, value in seconds.items()}
    return structs.replace(samples.goodput(run), nanoseconds=waits)


def test_an_unknown_time_is_no_time():
    assert tables.to_datetime(0) is None


def test_code_in_a_sentence_stands_in_quotes() -> None:
    text = formatting.sentence("Use `watch(signals=...)`\nor nothing.", 60)

    assert text == "Use 'watch(signals=...)' or nothing."
