"""A hang on the incident's page, and who waits for whom on the page of ranks."""

import msgspec
import numpy as np
import pytest

from tests.dashboard import samples
from tests.dashboard.look_back import INCIDENT, RANKS, with_look_back
from tests.dashboard.samples import NOW_NS
from tests.dashboard.stub import Stub
from tests.support.pages import Open, shown
from trainvitals.records import Finding
from trainvitals.views import FindingView, StacksView
from vitals_dashboard import stragglers

HANG_STEP = 240
SECOND = 10**9
WAITS = '  File "dist.py", line 9 in all_reduce'
LOADS = '  File "data.py", line 33 in load'


def stacks(rank: int, *calls: str, step: int = HANG_STEP, **fields: object) -> StacksView:
    text = "".join(f"{call}\n" for call in calls)
    given = {
        "time_unix_ns": NOW_NS,
        "attempt": 1,
        "collectives": (f"group 0 #{99 - (rank == 1)}: all_reduce(4096)",),
        "detail": "" if calls else "its process is stopped (SIGSTOP)",
    } | fields
    stacks = f"Current thread 0x1 (most recent call first):\n{text}" if calls else ""
    return StacksView(rank=rank, step=step, stacks=stacks, **given)


def finding(kind: str, seconds: float, after: int) -> FindingView:
    reason = f"Rank 1 is blocked in data.py:33 (load); ranks 0, 2 wait for it (for {seconds:g} s)"
    told = Finding(
        kind=kind, level="advisory", step=HANG_STEP, detector="hang", rank=1, reason=reason,
        value=seconds, limit=5.0,
    )  # fmt: skip
    return FindingView(run_id=samples.run_id(1), time_unix_ns=NOW_NS + after * SECOND, finding=told)


def hung():
    """A run of which rank 1 held the others up, as one incident."""
    sample = with_look_back(samples.sample_run())
    (incident,) = sample.incidents
    sample.incidents = [
        msgspec.structs.replace(
            incident,
            findings=(finding("waiting", 3.0, 0), finding("hang", 6.0, 3)),
        )
    ]
    sample.stacks = [
        stacks(0, WAITS), stacks(2, WAITS), stacks(1, LOADS), stacks(3), stacks(1, "old", step=7),
        stacks(0, "asked for", command_number=5),
    ]  # fmt: skip
    return sample


def test_a_hang_is_told_with_who_was_where_and_the_stacks_folded_out(
    stub: Stub, open_page: Open
) -> None:
    stub.add(hung())
    app = open_page("incident", incident=INCIDENT)
    said = shown(app)
    assert "Waits between ranks" in said
    (ranks,) = [t.value for t in app.dataframe if "Stood in" in t.value]
    assert ["waits", "waited for", "waits", "waits"] == list(ranks[""])
    assert ["group 0 #99: all_reduce(4096)"] == list(ranks["Last collective it began"][:1])
    assert 'File "data.py", line 33 in load' == ranks["Stood in"][1]
    assert "no stacks: its process is stopped (SIGSTOP)" == ranks["Stood in"][3]
    assert ["Where rank 1 stood", "Where ranks 0, 2 stood"] == [e.label for e in app.expander]
    assert WAITS.strip() in app.expander[1].code[0].value


def test_an_incident_without_a_wait_says_nothing_of_one(stub: Stub, open_page: Open) -> None:
    stub.add(with_look_back(samples.sample_run()))
    assert "Who waited" not in shown(open_page("incident", incident=INCIDENT))


@pytest.mark.parametrize("metric", ["steps.gradient_wait_seconds", "steps.communication_seconds"])
def test_the_ranks_page_says_who_waits_for_whom_by_the_best_column_there_is(
    stub: Stub, open_page: Open, metric: str
) -> None:
    sample = with_look_back(samples.sample_run())
    cells = sample.cells["steps.step_duration_seconds"]
    least = tuple(
        tuple(0.003 if row == "rank:3" else 0.065 for _ in cells.step) for row in cells.rows
    )
    for name in {metric, "steps.communication_seconds"}:
        sample.cells[name] = msgspec.structs.replace(cells, metric=name, value=least)
    with_it = {*sample.detail.metrics, metric, "steps.communication_seconds"}
    sample.detail = msgspec.structs.replace(sample.detail, metrics=tuple(sorted(with_it)))
    stub.add(sample)
    app = open_page("ranks")
    app.segmented_control(key="ranks_metric").set_value("wait for others")
    said = shown(app.run())
    assert "The others wait for rank 3 in 100% of the columns" in said
    assert "about 62 ms per step" in said


def test_a_wait_that_goes_round_is_nobody_s() -> None:
    rng = np.random.default_rng(0)
    steps = range(100)
    jitter = rng.uniform(0.01, 0.02, (8, 100))
    assert stragglers.blocking_rank_sentence(jitter, RANKS, steps).startswith("No straggler")
    one = jitter.copy()
    one[5] = 0.001
    assert "for rank 5 in 100%" in stragglers.blocking_rank_sentence(one, RANKS, steps)
    two = np.array([[0.001] * 10, [0.05] * 10])
    assert "for rank 0 in 100%" in stragglers.blocking_rank_sentence(two, RANKS[:2], range(10))
    assert "Too few" in stragglers.blocking_rank_sentence(one[:1], RANKS[:1], steps)
    assert "Too few" in stragglers.blocking_rank_sentence(
        np.full((2, 3), np.nan), RANKS[:2], range(3)
    )
