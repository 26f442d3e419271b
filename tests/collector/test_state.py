import pytest

from tests.collector.rows import SECOND, START
from vitals_collector.live.run_status import Liveness, SourceState, health, run_state


def source(
    name: str = "rank:0",
    *,
    started: int = 0,
    seen: int = 0,
    received: int | None = None,
    ended: str = "",
    alive: int = -1,
    world_size: int = 2,
) -> SourceState:
    return SourceState(
        source=name,
        started_unix_ns=START + started * SECOND,
        last_seen_unix_ns=START + seen * SECOND,
        last_received_unix_ns=0 if received is None else START + received * SECOND,
        alive=alive,
        ended_state=ended,
        world_size=world_size,
    )


def at(second: int, *, up_since: int = 0) -> Liveness:
    return Liveness(now_unix_ns=START + second * SECOND, up_since_unix_ns=START + up_since * SECOND)


@pytest.mark.parametrize(
    ("sources", "second", "state"),
    [
        ([source(seen=100)], 110, "running"),
        ([source(seen=100)], 200, "lost"),
        ([source(seen=100, ended="finished")], 9_999, "finished"),
        ([source(seen=100), source("node:a", seen=195)], 200, "running"),
        ([source(seen=100, alive=0), source("node:a", seen=195)], 200, "lost"),
        ([source(seen=100, alive=0), source("node:a", seen=110)], 110, "lost"),
        ([source(alive=0), source("rank:1", alive=1), source("node:a")], 10, "running"),
        ([source(alive=0), source("rank:1", alive=-1), source("node:a")], 10, "running"),
        ([source(alive=0), source("rank:1", alive=0, ended="failed")], 1, "failed"),
        ([source(alive=0), source(started=50, seen=60)], 61, "running"),
        ([source(seen=100), source("rank:1", seen=195)], 200, "running"),
        ([source(seen=100), source("rank:1", seen=100, ended="failed")], 200, "failed"),
        ([source(ended="interrupted"), source("rank:1", ended="failed")], 10, "failed"),
        ([source(ended="interrupted"), source(started=50, seen=100)], 110, "running"),
        # Rank 1 was killed, and the launcher interrupted rank 0 for it.
        ([source(seen=9, ended="interrupted"), source("rank:1", seen=8, alive=0)], 20, "failed"),
        # Both were interrupted, and rank 1 wrote on until it was killed.
        (
            [source(seen=9, ended="interrupted"), source("rank:1", seen=12, alive=0)],
            20,
            "interrupted",
        ),
        ([source(seen=9, ended="finished"), source("rank:1", seen=8, alive=0)], 20, "finished"),
        ([source(ended="halted"), source("rank:1", ended="failed")], 10, "halted"),
        # The new one's clock is two minutes behind.
        (
            [
                source(seen=50, received=50, ended="interrupted"),
                source(started=-60, seen=-50, received=70),
            ],
            80,
            "running",
        ),
        # The last words of the old one were still on its node when the new one ended.
        (
            [
                source(seen=50, received=900, ended="interrupted"),
                source(started=60, seen=800, received=800, ended="finished"),
            ],
            950,
            "finished",
        ),
        ([], 10, "lost"),
    ],
)
def test_the_state_of_a_run_follows_from_what_its_sources_said(
    sources: list[SourceState], second: int, state: str
):
    assert state == run_state(sources, at(second))


def test_a_rank_of_an_earlier_larger_world_does_not_count():
    old = source("rank:3", ended="failed", world_size=4)
    now = source(started=50, seen=60, ended="finished", world_size=2)
    assert "finished" == run_state([old, now], at(70))


def test_rows_that_arrive_late_or_with_a_wrong_clock_count_when_they_arrived():
    assert "running" == run_state([source(seen=-5_000, received=195)], at(200))
    assert "lost" == run_state([source(seen=50_000, received=100)], at(200))


@pytest.mark.parametrize(
    ("source_", "state"),
    [
        (source(seen=100), "running"),
        (source(seen=100, alive=0), "running"),
        (source(seen=100, ended="finished"), "finished"),
        (source(seen=100, received=100), "lost"),
    ],
    ids=["silent", "gone", "ended", "sent"],
)
def test_a_run_is_not_lost_while_its_folder_is_still_being_read(source_: SourceState, state: str):
    when = Liveness(now_unix_ns=START + 9_999 * SECOND, is_reading_in=True)
    assert state == run_state([source_], when)


def test_silence_while_the_collector_was_away_is_not_held_against_a_run():
    silent = [source(seen=100, received=100)]
    assert "running" == run_state(silent, at(1_000, up_since=990))
    assert "lost" == run_state(silent, at(1_100, up_since=990))


@pytest.mark.parametrize(
    ("state", "how", "word"),
    [
        ("running", {}, "healthy"),
        ("running", {"has_steps": False}, "unknown"),
        ("running", {"recent_action": True}, "acting"),
        ("running", {"lr_factor": 0.5}, "acting"),
        ("finished", {"recent_action": True}, "healthy"),
        ("finished", {"recent_action": True, "ended_in_trouble": True}, "acting"),
        ("running", {"firing_pages": 1}, "critical"),
        ("lost", {"has_steps": False}, "critical"),
        ("finished", {"is_broken": True}, "critical"),
        ("running", {"is_broken": True, "lr_factor": 0.5}, "critical"),
        ("running", {"is_broken": True, "recent_action": True}, "acting"),
        ("running", {"is_unguarded": True, "firing_pages": 1}, "unguarded"),
        ("finished", {"is_unguarded": True}, "unguarded"),
        ("finished", {"is_unguarded": True, "is_broken": True}, "critical"),
        ("failed", {"is_unguarded": True}, "critical"),
    ],
)
def test_health_is_the_worst_that_is_known(state: str, how: dict[str, object], word: str):
    known = {"has_steps": True, "recent_action": False, "lr_factor": 1.0, "firing_pages": 0}
    assert word == health(state, **(known | how))
