"""Who is waited for, and when somebody must come: by what the agents see, without a clock."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainvitals.detect.hang import (
    FAILED,
    HangConfig,
    HangFollower,
    WaitHistory,
    judge_hang,
    may_end,
)
from trainvitals.records import RankActivity


def a_rank(rank: int, number: int = 10, **fields: Any) -> RankActivity:
    """One that has been still for 8 s in collective ``number``, and waits."""
    default = {"step": 5, "phase": "forward_backward", "num_steps": 5, "is_active": False}
    default |= {"still_seconds": 8.0, "sequences": {"0": number}}
    return RankActivity(rank=rank, **{**default, **fields})


def usual(seconds: float = 0.5) -> WaitHistory:
    history = WaitHistory()
    for phase in ("forward_backward", "data", "exchange"):
        for _ in range(20):
            history.add(phase, seconds)
    return history


def verdict(*ranks: RankActivity, history: WaitHistory | None = None, world: int = 0):
    return judge_hang(
        ranks, (history or usual()).limits(HangConfig()), world_size=world or len(ranks)
    )


def test_the_rank_that_has_begun_fewer_collectives_is_the_one_waited_for():
    told = verdict(a_rank(0), a_rank(1, 9, where="train.py:33 (load)", phase="data"), a_rank(2))
    assert (1,) == told.culprits
    assert "blocked" == told.reason and told.pages
    assert told.text == "Rank 1 is blocked in train.py:33 (load); ranks 0, 2 wait for it (for 8 s)"


def test_a_gpu_that_has_not_begun_what_others_have_begun_is_the_one_waited_for():
    """A kernel that does not end: its host has issued as much as the others."""
    others = (a_rank(0, started={"0": 10}), a_rank(2, started={"0": 10}))
    told = verdict(*others, a_rank(1, started={"0": 8}))
    assert (1,) == told.culprits and "device" == told.reason
    assert 30.0 == told.limit and not told.pages  # work that is queued on it may take so long
    others = tuple(replace(rank, still_seconds=31.0) for rank in others)
    told = verdict(*others, a_rank(1, started={"0": 8}, still_seconds=31.0))
    assert told.pages
    assert "Rank 1 has a GPU that has not begun a collective" in told.text
    assert not may_end(told, [*others, a_rank(1, started={"0": 8})])  # it may be a long queue
    announced = a_rank(1, started={"0": 8}, still_seconds=31.0, is_announced=True)
    assert 180.0 == verdict(*others, announced).limit
    assert verdict(*others, a_rank(1)) is None  # its recorder does not know
    behind = verdict(*others, a_rank(1, 9, started={"0": 8}))
    assert "blocked" == behind.reason


def test_the_step_is_the_one_that_the_others_wait_in():
    """A stopped rank's last word may be ten steps old."""
    assert 15 == verdict(a_rank(0, step=15), a_rank(1, 9, process="stopped")).step


def test_a_wait_is_shown_first_and_pages_only_beyond_the_phases_limit():
    ranks = a_rank(0), a_rank(1, 9)
    assert verdict(*(replace(r, still_seconds=2.9) for r in ranks)) is None
    assert not verdict(*(replace(r, still_seconds=4.0) for r in ranks)).pages
    assert verdict(*(replace(r, still_seconds=5.0) for r in ranks)).pages
    slow = usual(4.0)  # here such a phase takes up to 4 s
    assert verdict(*ranks, history=slow) is None
    assert 20.0 == verdict(*(replace(r, still_seconds=13.0) for r in ranks), history=slow).limit


def test_one_that_computes_pages_after_minutes_and_never_where_it_was_announced():
    waits = a_rank(0, still_seconds=120.0)
    busy = a_rank(1, 9, is_active=True, still_seconds=120.0)
    told = verdict(waits, busy)
    assert "computing" == told.reason and not told.pages and 180.0 == told.limit
    later = [replace(rank, still_seconds=181.0) for rank in (waits, busy)]
    assert verdict(*later).pages
    assert math.inf == verdict(later[0], replace(later[1], is_announced=True)).limit
    history = usual()
    history.add_ended_wait(60.0)  # an evaluation was waited for that long before
    assert 300.0 == verdict(*later, history=history).limit


def test_an_announced_wait_for_a_disk_is_given_minutes_and_a_stopped_rank_is_not():
    ranks = a_rank(0), a_rank(1, 9, is_announced=True)
    assert 180.0 == verdict(*ranks).limit
    assert 5.0 == verdict(ranks[0], replace(ranks[1], process="stopped")).limit


@pytest.mark.parametrize("state", ["stopped", "gone"])
def test_a_process_that_is_stopped_or_gone_is_named_at_once_also_from_a_part_of_the_job(state):
    ranks = [a_rank(0, still_seconds=1.2), a_rank(1, process=state, still_seconds=1.5)]
    told = verdict(*ranks, world=8)
    assert ((1,), state, False) == (told.culprits, told.reason, told.pages)
    assert verdict(*(replace(rank, still_seconds=6.0) for rank in ranks)).pages


def test_from_a_part_of_the_job_nobody_is_named_by_numbers():
    assert verdict(a_rank(0), a_rank(1, 9), world=4) is None


def test_a_wait_for_a_disk_is_said_at_once_and_given_minutes():
    """The agent counts the system's uninterruptible sleep as work: a save may wait so."""
    told = verdict(a_rank(0), a_rank(1, 9, process="disk", is_active=True))
    assert not told.pages and 180.0 == told.limit
    assert "blocked in a call to the system that cannot be interrupted" in told.text


def test_a_job_that_is_stopped_as_a_whole_is_no_hang():
    assert verdict(a_rank(0, process="stopped"), a_rank(1, 9, process="stopped")) is None


def test_a_job_that_has_ended_is_no_hang():
    assert verdict(a_rank(0, process="ended"), a_rank(1, 9, process="gone")) is None


def test_a_rank_that_finished_before_the_others_is_named():
    told = verdict(a_rank(0), a_rank(1, 9, process="ended"))
    assert ((1,), "ended", True) == (told.culprits, told.reason, told.pages)
    assert told.text.startswith("Rank 1 finished training before the others; rank 0 waits for it")
    failed = verdict(a_rank(0), a_rank(1, 9, process="ended", exit=FAILED))
    assert failed.text.startswith("Rank 1 failed; rank 0 waits for it")
    last = a_rank(0, is_active=True, still_seconds=120.0)  # saves the model, alone, at the end
    assert verdict(last, a_rank(1, process="ended")) is None


def test_a_rank_that_waits_for_another_one_is_not_the_culprit():
    """Rank 1 is behind in the data-parallel group, as it waits for rank 2 in the model's."""
    ranks = (
        a_rank(0, sequences={"dp": 10}),
        a_rank(1, sequences={"dp": 9, "tp": 7}),
        a_rank(2, sequences={"tp": 6}),
    )
    assert (2,) == verdict(*ranks).culprits


def test_different_collectives_under_one_number_name_the_odd_one():
    ours, theirs = {"0": {10: "all_reduce(4)"}}, {"0": {10: "broadcast(4)"}}
    ranks = [a_rank(r, last_collectives=theirs if r == 2 else ours) for r in range(4)]
    told = verdict(*ranks)
    assert ((2,), "order", True) == (told.culprits, told.reason, told.pages)
    assert "ranks 0, 1, 3 called all_reduce(4); rank 2 called broadcast(4)" in told.text
    of_two = verdict(*ranks[1:3])
    assert (1, 2) == of_two.culprits, "of two nobody knows which one is right"


def test_uneven_parts_of_an_all_gather_are_no_disagreement():
    calls = [{"0": {10: f"all_gather({n})"}} for n in (4, 5)]
    assert verdict(*(a_rank(r, last_collectives=calls[r]) for r in range(2))) is None


def test_a_debugger_never_pages():
    for held in ({"is_debugged": True}, {"process": "traced"}):
        told = verdict(a_rank(0, still_seconds=1e4), a_rank(1, 9, still_seconds=1e4, **held))
        assert ("debugged", False) == (told.reason, told.pages)


def test_native_code_that_holds_the_interpreter_is_said_and_pages_as_what_it_does():
    sleeps = verdict(a_rank(0), a_rank(1, 9, is_mute=True))
    assert ("interpreter", 5.0) == (sleeps.reason, sleeps.limit)
    assert 180.0 == verdict(a_rank(0), a_rank(1, 9, is_mute=True, is_active=True)).limit


def test_a_first_step_may_take_its_time():
    first = {"num_steps": 0, "still_seconds": 50.0}
    assert not verdict(a_rank(0, **first), a_rank(1, 9, **first), history=WaitHistory()).pages


def test_silence_of_the_whole_job_pages_late_and_not_while_somebody_computes():
    ranks = [a_rank(r, still_seconds=179.0) for r in range(2)]
    assert verdict(*ranks) is None
    late = [replace(rank, still_seconds=181.0) for rank in ranks]
    assert ("all", True, ()) == (
        verdict(*late).reason,
        verdict(*late).pages,
        verdict(*late).culprits,
    )
    assert verdict(late[0], replace(late[1], is_active=True)) is None
    assert verdict(late[0], replace(late[1], is_announced=True)) is None


def test_silence_of_a_single_rank_is_no_hang():
    """It may be a notebook between two cells."""
    assert verdict(a_rank(0, still_seconds=1000.0)) is None


def test_without_numbers_the_steps_tell():
    bare = {"sequences": {}}
    assert (0,) == verdict(a_rank(0, step=4, **bare), a_rank(1, step=5, **bare)).culprits
    assert verdict(a_rank(0, **bare), a_rank(1, **bare)) is None


@given(
    st.lists(
        st.builds(
            RankActivity,
            rank=st.integers(0, 5),
            sequences=st.dictionaries(st.sampled_from("ab"), st.integers(0, 3)),
            process=st.sampled_from(["alive", "disk", "stopped", "traced", "gone", "ended"]),
            still_seconds=st.floats(0, 400),
            is_active=st.booleans(),
            is_announced=st.booleans(),
            is_mute=st.booleans(),
            num_steps=st.integers(0, 3),
        ),
        max_size=5,
        unique_by=lambda rank: rank.rank,
    )
)
def test_whatever_is_seen_a_page_names_somebody_who_does_not_move(ranks):
    told = judge_hang(ranks, usual().limits(HangConfig()), world_size=len(ranks))
    if told is not None and told.pages:
        assert told.seconds >= HangConfig().page_seconds
        stuck = [rank for rank in ranks if rank.rank in told.culprits]
        assert stuck or told.reason == "all"
        assert all(rank.still_seconds >= told.limit for rank in stuck)


def test_each_level_is_told_once_and_again_when_it_comes_again():
    follower = HangFollower()
    for _ in range(20):
        follower.history.add("forward_backward", 0.5)

    def at(seconds: float, **fields: Any) -> list[str]:
        ranks = [a_rank(0, still_seconds=seconds), a_rank(1, 9, still_seconds=seconds, **fields)]
        return [finding.kind for finding in follower.new_findings(ranks, world_size=2)]

    assert [] == at(1.0)
    assert ["waiting"] == at(4.0)
    assert ["hang"] == at(6.0)
    assert [] == at(60.0)
    assert [] == at(0.5) and follower.verdict is None
    assert ["waiting", "hang"] == at(9.0)


def test_a_wait_that_ended_by_itself_is_learnt_from():
    follower = HangFollower()
    follower.new_findings(
        [a_rank(0, still_seconds=90.0), a_rank(1, 9, still_seconds=90.0, is_active=True)],
        world_size=2,
    )
    follower.new_findings(
        [a_rank(0, still_seconds=0.1), a_rank(1, still_seconds=0.1)], world_size=2
    )
    assert 450.0 == follower.history.limits(follower.config).computing


@pytest.mark.parametrize(
    ("fields", "is_over"),
    [
        ({}, True),
        ({"process": "stopped"}, True),
        ({"is_mute": True}, True),
        ({"is_active": True}, False),
        ({"process": "disk", "is_active": True}, False),
        ({"is_announced": True}, False),
        ({"is_debugged": True}, False),
        ({"process": "ended"}, False),
    ],
    ids=str,
)
def test_a_job_that_pages_is_ended_only_where_its_culprit_is_at_no_work(fields, is_over):
    still = {"still_seconds": 400.0, "num_steps": 50, "phase": "forward_backward"}
    waits = RankActivity(rank=0, sequences={"0": 9}, is_active=True, **still)
    given = {"is_active": False, "sequences": {"0": 8}} | still | fields
    ranks = [waits, RankActivity(rank=1, **given)]
    verdict = judge_hang(ranks, usual().limits(HangConfig()), world_size=2)
    assert is_over == (verdict is not None and may_end(verdict, ranks))


def a_stage(rank: int, pipeline: str, number: int = 10, **fields: Any) -> RankActivity:
    where = f"train.py:{rank} (forward), stage {rank} of the pipeline"
    return a_rank(rank, number, pipeline=pipeline, where=where, **fields)


def test_the_stage_that_waits_for_no_other_is_named_whatever_the_counts_of_messages():
    """Rank 3 has received less than the others, because stage 2 stands still."""
    ranks = [a_stage(0, "waits", 30), a_stage(1, "waits", 28), a_stage(2, "works", 27)]
    told = verdict(*ranks, a_stage(3, "waits", 20))
    assert (2,) == told.culprits and "blocked" == told.reason and told.pages
    assert told.text.startswith(
        "Rank 2 is blocked in train.py:2 (forward), stage 2 of the pipeline; ranks 0, 1, 3 wait"
    )
    busy = replace(ranks[2], is_active=True)
    told = verdict(ranks[0], ranks[1], busy, a_stage(3, "waits", 20))
    assert "computing" == told.reason and not told.pages and 180.0 == told.limit


@pytest.mark.parametrize("pipeline", ["waits", "works"])
def test_stages_that_all_do_the_same_name_none(pipeline: str):
    ranks = [a_stage(rank, pipeline, 10 - rank) for rank in range(3)]
    assert verdict(*ranks) is None
    still = verdict(*(replace(rank, still_seconds=181.0) for rank in ranks))
    assert "all" == still.reason and still.pages


def test_stages_that_called_different_collectives_are_no_disagreement():
    """Their numbers count messages too, so equal numbers are other calls."""
    calls = ("all_reduce(8)", "broadcast(8)")
    ranks = [
        a_stage(rank, "waits", last_collectives={"0": {10: call}})
        for rank, call in enumerate(calls)
    ]
    assert verdict(*ranks) is None
