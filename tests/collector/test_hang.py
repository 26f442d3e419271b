"""A hang across nodes: no node sees all ranks, the collector does; and what an agent found."""

from pathlib import Path
from typing import Any

import pytest

from tests.collector.alerting import Job
from tests.collector.rows import Writer
from tests.support.cli import leave, vitals
from trainvitals.detect.hang import HangConfig, WaitHistory
from trainvitals.records import (
    Finding,
    FindingRaised,
    Note,
    RankActivity,
    RanksStill,
    RunEnded,
    StacksTaken,
)
from trainvitals.views import (
    EventsQuestion,
    IncidentsQuestion,
    RunQuestion,
    StacksQuestion,
    StacksView,
)
from vitals_collector.queries.query import Query
from vitals_collector.queries.stacks import grouped_stacks_text, wait_stacks_text
from vitals_collector.storage.store import Store

LIMITS = WaitHistory().limits(HangConfig())


@pytest.fixture
def job(store: Store) -> Job:
    job = Job(store, world=2)
    job.train(range(5))
    job.look()
    return job


def still(rank: int, seconds: float, number: int = 20, **fields: Any) -> RanksStill:
    default = {"step": 5, "num_steps": 5, "is_active": False, "phase": "forward_backward"}
    default |= {"sequences": {"0": number}, "still_seconds": seconds}
    activity = RankActivity(rank=rank, node=f"node-{rank}", **(default | fields))
    return RanksStill(world_size=2, ranks=(activity,), limits=LIMITS)


class Nodes:
    """Two nodes' agents, each with one rank of the job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.agents = [Writer(f"node:node-{r}", node=f"node-{r}") for r in range(2)]

    def say(self, *events: RanksStill) -> list[tuple[str, int]]:
        for agent, event in zip(self.agents, events, strict=True):
            self.job.place.send(agent.events(event, step=-1))
        self.job.look()
        return self.job.found()


def test_who_is_waited_for_on_another_node_is_told_and_then_pages(job: Job):
    nodes = Nodes(job)
    assert [] == nodes.say(still(0, 2.0), still(1, 2.0, 19))
    assert [("waiting", 5)] == nodes.say(still(0, 4.0), still(1, 4.0, 19, where="a.py:3 (load)"))
    assert [] == job.look()
    assert [("waiting", 5), ("hang", 5)] == nodes.say(still(0, 6.0), still(1, 6.0, 19))
    assert ["RankHung firing"] == job.look()
    (alert,) = job.place.alerts()
    assert "Rank 1 is blocked; rank 0 waits for it" in alert.summary
    assert [("waiting", 5), ("hang", 5)] == nodes.say(still(0, 8.0), still(1, 8.0, 19))


def test_a_hang_whose_cause_changes_is_one_alert_and_pages_once(job: Job):
    nodes = Nodes(job)
    nodes.say(still(0, 6.0), still(1, 6.0, 19))
    changes: list[dict[str, Any]] = [{"is_mute": True}, {"process": "stopped"}, {"process": "gone"}]
    for change in changes:
        nodes.say(still(0, 8.0), still(1, 8.0, 19, **change))
    assert 4 == [kind for kind, _ in job.found()].count("hang"), "each cause is recorded"
    assert ["RankHung firing"] == job.look()
    (alert,) = job.place.alerts()
    assert "Rank 1 ended without" in alert.summary


def test_what_moves_again_is_forgotten(job: Job):
    nodes = Nodes(job)
    moved = RanksStill(world_size=2, ranks=(), limits=LIMITS)
    nodes.say(still(0, 2.5), still(1, 2.5, 19))
    nodes.say(moved, moved)
    job.place.pass_time(30)
    assert [] == job.found()


def test_a_node_that_says_nothing_any_more_names_nobody(job: Job):
    Nodes(job).say(still(0, 2.5), still(1, 2.5, 19))
    job.place.pass_time(60)
    assert "hang" not in [kind for kind, _ in job.found()]


def without_steps(job: Job) -> list[str]:
    """Let forty minutes pass in which the agent speaks and no step is made."""
    agent = Writer("node:node-a")
    for second in range(0, 2_400, 50):
        job.place.send(agent.node_rows([second]))
        job.place.clock.advance(50)
        job.look()
    return job.look()


def test_a_stall_of_a_hang_that_was_told_does_not_page_again(job: Job):
    Nodes(job).say(still(0, 6.0), still(1, 6.0, 19))
    words = without_steps(job)
    assert ("stalled", 4) in job.found()
    assert not any(word.startswith("TrainingStalled") for word in words)


def test_without_a_hang_a_stall_pages_as_ever(job: Job):
    assert "TrainingStalled firing" in without_steps(job)


def test_a_rank_that_is_lost_afterwards_does_not_hide_who_hung(job: Job):
    agent = Writer("node:node-a")
    finding = Finding(
        kind="hang",
        level="advisory",
        step=5,
        detector="hang",
        reason="Rank 1 is stopped (SIGSTOP); rank 0 waits for it (for 6 s)",
        rank=1,
        cause="hang_stopped",
    )
    job.place.send(agent.events(FindingRaised(finding=finding), step=5))
    assert ["RankHung firing"] == job.look()
    # The launcher ends the job; of its ranks, rank 0 is gone first.
    gone = "rank 0 (pid 100 on node-a) ended without a clean exit; its last step is 4"
    job.place.send(agent.process_rows(9, {0: (100, 0), 1: (100, 0)}))
    job.place.send(agent.events(Note(code="rank_gone", text=gone, severity="error"), step=4))
    job.place.pass_time(30)
    detail = Query(job.place.store, clock=job.place.clock).ask(
        RunQuestion(run_id=job.ranks[0].identity.run_id)
    )
    assert "lost" == detail.summary.state
    (lost,) = [alert for alert in job.place.alerts() if alert.name == "RunLost"]
    assert lost.summary.startswith("Rank 1 is stopped (SIGSTOP)")
    assert "rank 0" in lost.summary


def test_the_timeline_of_an_incident_has_the_end_of_a_wait(job: Job):
    agent = Writer("node:node-a")
    finding = Finding(
        kind="hang", level="advisory", step=5, detector="hang", rank=1, cause="hang_stopped",
        reason="Rank 1 is stopped (SIGSTOP); rank 0 waits for it (for 6 s)",
    )  # fmt: skip
    job.place.send(agent.events(FindingRaised(finding=finding), step=5))
    over = Note(code="wait_over", text="The wait is over, after 9.0 s.")
    job.place.send(agent.events(over, step=5))
    query = Query(job.place.store, clock=job.place.clock)
    (incident,) = query.ask(IncidentsQuestion(run_id=job.ranks[0].identity.run_id))
    texts = [entry.text for entry in incident.verdict.timeline]
    assert "The wait is over, after 9.0 s." in texts
    assert incident.verdict.cause.startswith("Rank 1 is stopped (SIGSTOP)")


def test_stacks_are_a_line_of_the_runs_events(job: Job):
    agent = Writer("node:node-a")
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "worker.py", line 3 in run\n\n'
        'Current thread 0x2 (most recent call first):\n  File "data.py", line 33 in load\n'
        '  File "train.py", line 9 in main\n'
    )
    job.place.send(agent.events(StacksTaken(rank=1, stacks=stacks)))
    query = Query(job.place.store, clock=job.place.clock)
    events = query.ask(EventsQuestion(run_id=job.ranks[0].identity.run_id, kind="StacksTaken"))
    (view,) = query.ask(StacksQuestion(run_id=job.ranks[0].identity.run_id))
    assert (1, stacks) == (view.rank, view.stacks)
    assert wait_stacks_text([view], 0) == (
        'Rank 1:\n  File "data.py", line 33 in load\n  File "train.py", line 9 in main'
    )
    assert ['stacks of rank 1: File "data.py", line 33 in load'] == [e.text for e in events]


@pytest.mark.parametrize(
    ("how", "seconds", "is_first"),
    [
        ("signal 9, SIGKILL", 0.5, True),
        ("signal 15, SIGTERM", 0.5, False),  # by the launcher, as another rank failed
        ("signal 9, SIGKILL", 30.0, False),  # by the launcher, after its grace
    ],
)
def test_a_rank_that_was_killed_is_why_the_others_failed(job: Job, how, seconds, is_first):
    agent = Writer("node:node-a")
    failed = RunEnded(state="failed", reason="RuntimeError: Connection closed by peer")
    job.place.send(job.ranks[0].events(failed, step=5))
    text = f"rank 1 (pid 100 on node-a) ended without a clean exit ({how}); its last step is 4"
    at = job.ranks[0].time_of(5) + int(seconds * 1e9)
    gone = Note(code="rank_gone", text=text, severity="error")
    job.place.send(agent.events(gone, step=4, at=at))
    job.look()
    (alert,) = [alert for alert in job.place.alerts() if alert.name == "RunFailed"]
    assert is_first == alert.summary.startswith("rank 1 (pid 100 on node-a) ended without")
    assert "Connection closed by peer" in alert.summary


def test_show_lists_who_was_waited_for_and_why_where_each_rank_stood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    agent = Writer("node:a")
    reason = "Rank 1 is blocked in data.py:33 (load); rank 0 waits for it (for 6 s)"
    findings = [
        Finding(kind=kind, level="advisory", step=5, detector="hang", reason=reason, rank=1)
        for kind in ("waiting", "hang")
    ]
    stacks = StacksTaken(
        rank=1,
        stacks='Thread 0x1 (most recent call first):\n  File "data.py", line 33 in load\n',
        collectives=("group 0 #19: all_reduce(4) scheduled",),
    )
    leave(
        tmp_path,
        Writer().steps(range(5), loss=1.0),
        agent.events(*(FindingRaised(finding=finding) for finding in findings), step=5),
        agent.events(stacks, step=5),
    )
    assert 0 == vitals("show", tmp_path)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    (cause,) = [line for line in shown if line[:1] == ["cause"]]
    assert 1 == cause.count("blocked"), "told once, though it was shown and then paged"
    assert ["no", "yes"] == [line[3] for line in shown if "blocked" in line and line != cause]
    assert 0 == vitals("why", tmp_path, 5)
    text = capsys.readouterr().out
    assert 1 == " ".join(text.split()).count("Rank 1 is blocked in data.py:33")
    assert "Rank 1, last collective group 0 #19: all_reduce(4) scheduled:" in text
    assert 'File "data.py", line 33 in load' in text


def asked(rank: int, *calls: str, step: int = 7, detail: str = "", **fields: Any) -> StacksView:
    stacks = "".join(f"{call}\n" for call in calls)
    stacks = f"Current thread 0x1 (most recent call first):\n{stacks}" if stacks else ""
    given = {"time_unix_ns": 1, "attempt": 1, "collectives": (), "command_number": 7} | fields
    return StacksView(rank=rank, step=step, stacks=stacks, detail=detail, **given)


def test_ranks_at_one_place_are_shown_together_the_odd_one_first():
    waits = ('  File "dist.py", line 9 in all_reduce', '  File "train.py", line 3 in <module>')
    views = [asked(rank, *waits, collectives=("group 0 #9: all_reduce(4)",)) for rank in (0, 1, 3)]
    views += [asked(2, '  File "data.py", line 33 in load', step=6)]
    views += [asked(4, detail="its process is stopped (SIGSTOP)")]
    shown = grouped_stacks_text(views, 8).splitlines()
    assert [
        "Rank 4 did not answer: its process is stopped (SIGSTOP)",
        "Ranks 5 to 7 did not answer: no answer from its node's agent",
        "Rank 2, step 6:",
        '  File "data.py", line 33 in load',
        "Ranks 0, 1, 3, step 7, last collective group 0 #9: all_reduce(4):",
    ] == shown[:5]
    assert [*waits] == shown[5:]


def test_why_leaves_out_what_a_person_asked_for(job: Job):
    wait = asked(1, '  File "a.py", line 1 in f', command_number=0)
    later = asked(1, '  File "b.py", line 2 in g')
    assert "a.py" in wait_stacks_text([wait, later], 7)
    assert "b.py" not in wait_stacks_text([wait, later], 7)
