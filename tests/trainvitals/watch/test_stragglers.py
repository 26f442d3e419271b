"""Who is late, by what and how often: over made-up jobs in which ranks wait for each other."""

import random
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.fleet.base import MergedStep, NodeSample
from trainvitals.detect.fleet.node import HARDWARE_HEAT
from trainvitals.detect.fleet.straggler import StragglerConfig, StragglerWatcher
from trainvitals.records import Finding
from trainvitals.testing.merged import watched

STEP = 0.1
OWN = {
    "data_wait_seconds": 0.01,
    "before_forward_seconds": 0.01,
    "forward_seconds": 0.025,
    "backward_seconds": 0.04,
    "after_backward_seconds": 0.001,
    "optimizer_seconds": 0.01,
    "monitor_seconds": 0.001,
}
CAUSES = {
    "data_wait_seconds": "data",
    "before_forward_seconds": "host",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "after_backward_seconds": "host",
    "optimizer_seconds": "optimizer",
    "link": "link",
}
Late = Callable[[int, int, str], float]
"""By step, rank and part: how late a rank is there, in shares of a step."""


def trained(
    late: Late, *, ranks: int, steps: int, seed: int = 0, noise: float = 0.01
) -> Iterator[MergedStep]:
    """Yield the steps of a job whose ranks wait for each other's gradients, and in the exchange."""
    rng = random.Random(seed)
    began = [0.0] * ranks
    before = [OWN["optimizer_seconds"]] * ranks

    def part(step: int, rank: int, name: str) -> float:
        spent = OWN.get(name, 0.0) * (1.0 + abs(rng.gauss(0.0, noise)))
        return spent + STEP * late(step, rank, name)

    for step in range(steps):
        names = [*OWN, "link"]
        own = {name: [part(step, rank, name) for rank in range(ranks)] for name in names}
        own_before = [
            own["data_wait_seconds"][r] + own["before_forward_seconds"][r]
            + own["forward_seconds"][r] + own["backward_seconds"][r] + before[r]
            for r in range(ranks)
        ]  # fmt: skip
        ready = [began[r] + own_before[r] for r in range(ranks)]
        summed = [max(ready) + 0.002 + own["link"][r] for r in range(ranks)]
        arrived = [
            summed[r] + own["after_backward_seconds"][r] + own["monitor_seconds"][r]
            for r in range(ranks)
        ]
        over = max(arrived) + 0.001
        before = own["optimizer_seconds"]
        columns = {name: own[name] for name in OWN}
        columns["gradient_wait_seconds"] = [summed[r] - ready[r] for r in range(ranks)]
        columns["communication_seconds"] = [over - arrived[r] for r in range(ranks)]
        columns["step_duration_seconds"] = [over - min(began)] * ranks
        began = [over] * ranks
        yield MergedStep(step=step, attempt=1, time_unix_ns=0, ranks=columns)


def told(steps: Iterator[MergedStep], watcher: StragglerWatcher | None = None) -> list[Finding]:
    watcher = watcher or StragglerWatcher()
    return [finding for step in steps for finding in watcher.update(step)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("place", CAUSES)
def test_a_late_rank_is_told_within_40_steps_with_its_cause(
    place: str, share: float, ranks: int
) -> None:
    def late(step: int, rank: int, part: str) -> float:
        return share if (rank, part) == (1, place) and step >= 60 else 0.0

    (finding,) = told(trained(late, ranks=ranks, steps=120, noise=0.05))
    assert (1, f"straggler_{CAUSES[place]}") == (finding.rank, finding.cause)
    assert finding.step < 100
    assert 55 <= finding.onset_step <= 65


def test_noise_of_a_shared_processor_is_not_the_start_of_a_straggler() -> None:
    def late(step: int, rank: int, part: str) -> float:
        if rank != 1:
            return 0.0
        if part == "data_wait_seconds":
            return 0.9 if step >= 60 else 0.0
        return 0.05 if part == "forward_seconds" and 48 <= step < 60 else 0.0

    (finding,) = told(trained(late, ranks=2, steps=120, noise=0.0))
    assert (1, "straggler_data", 60) == (finding.rank, finding.cause, finding.onset_step)


def test_the_finding_has_its_evidence_and_its_cost() -> None:
    def late(_step: int, rank: int, part: str) -> float:
        return 0.6 if (rank, part) == (3, "backward_seconds") else 0.0

    (finding,) = told(trained(late, ranks=4, steps=40, noise=0.0))
    assert (19, 0) == (finding.step, finding.onset_step)
    assert finding.reason == (
        "rank 3 is late by 60 ms a step since step 0: backward compute takes 100 ms against 40 ms "
        "of the others; it costs 37.5% of the job: 375 of every 1,000 steps of 160 ms, and 1.5 "
        "GPU-hours in every hour of 4 ranks"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_jitter_that_goes_round_is_not_told(ranks: int) -> None:
    rng = random.Random(ranks)
    drawn = [(rng.randrange(ranks), rng.choice(list(CAUSES))) for _ in range(500)]

    def at_random(step: int, rank: int, part: str) -> float:
        return 0.3 if (rank, part) == drawn[step] else 0.0

    def in_turn(step: int, rank: int, part: str) -> float:
        return 0.3 if (rank, part) == (step % ranks, "forward_seconds") else 0.0

    for late in (at_random, in_turn):
        assert [] == told(trained(late, ranks=ranks, steps=500))


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_clean_job_is_silent_however_noisy(ranks: int) -> None:
    rng = random.Random(1)
    jitter = [[rng.expovariate(8.0) for _ in range(ranks)] for _ in range(500)]

    def late(step: int, rank: int, part: str) -> float:
        logs = 0.03 if rank == 0 and part == "after_backward_seconds" else 0.0
        return logs + (jitter[step][rank] if part == "backward_seconds" else 0.0)

    assert [] == told(trained(late, ranks=ranks, steps=500))


@pytest.mark.parametrize("every", [8, 10, 20])
def test_a_periodic_evaluation_of_one_rank_is_not_told(every: int) -> None:
    def late(step: int, rank: int, part: str) -> float:
        is_due = step % every == 0 and (rank, part) == (0, "before_forward_seconds")
        return 5.0 if is_due else 0.0

    for ranks in (2, 4):
        assert [] == told(trained(late, ranks=ranks, steps=300))


@pytest.mark.parametrize(
    ("every", "words"),
    [(2, "in every other step"), (3, "in every 3rd step"), (4, "in every 4th step")],
)
def test_a_rank_that_is_late_at_every_nth_step_is_told_so(every: int, words: str) -> None:
    def late(step: int, rank: int, part: str) -> float:
        is_due = step % every == 0 and (rank, part) == (1, "data_wait_seconds")
        return 0.5 if is_due and step >= 40 else 0.0

    (finding,) = told(trained(late, ranks=4, steps=100, noise=0.0))
    assert (1, "straggler_data") == (finding.rank, finding.cause)
    assert words in finding.reason
    assert "late by 50 ms" in finding.reason


def test_a_whole_slow_node_is_one_finding() -> None:
    def late(_step: int, rank: int, part: str) -> float:
        return 0.3 if rank >= 6 and part == "forward_seconds" else 0.0

    (finding,) = told(trained(late, ranks=8, steps=100, noise=0.0))
    assert (6, "straggler_forward") == (finding.rank, finding.cause)
    assert "; rank 7 is late as well; it costs" in finding.reason


def test_lateness_in_all_parts_alike_must_last() -> None:
    """A neighbour on the processor slows everything down, and mostly goes away."""

    def late(step: int, rank: int, part: str) -> float:
        shared = ("data_wait", "before_forward", "forward", "backward")
        is_part = part.removesuffix("_seconds") in shared
        return 0.05 if rank == 1 and is_part and step >= 50 else 0.0

    assert [] == told(trained(late, ranks=2, steps=250))
    (finding,) = told(trained(late, ranks=2, steps=400))
    assert "straggler_host" == finding.cause
    assert "every part of its step takes a little longer" in finding.reason


def test_milliseconds_of_short_steps_are_nothing() -> None:
    """Rank 0 of a toy writes its log: 30 % of a step, and a millisecond."""
    course = (
        "step_duration_seconds[*] 0.005x100; gradient_wait_seconds[*] 0.0016x100; "
        "gradient_wait_seconds[0] 0.0001x100; before_forward_seconds[*] 0.0001x100; "
        "before_forward_seconds[0] 0.0016x100; communication_seconds[*] 0.0001x100"
    )
    assert [] == watched(StragglerWatcher(), course, ranks=4)


def test_it_is_told_again_once_it_had_passed() -> None:
    def late(step: int, rank: int, part: str) -> float:
        is_on = 40 <= step < 100 or 200 <= step
        return 0.3 if (rank, part) == (1, "forward_seconds") and is_on else 0.0

    watcher, lasting = StragglerWatcher(), []
    findings = []
    for step in trained(late, ranks=4, steps=240):
        findings += watcher.update(step)
        lasting.append(watcher.goes_on)
    assert [59, 219] == [finding.step for finding in findings]
    assert (True, False, True) == (lasting[99], lasting[180], lasting[-1])


def test_another_cause_is_told_while_the_rank_stays_late() -> None:
    def late(step: int, rank: int, part: str) -> float:
        place = "forward_seconds" if step < 100 else "link"
        return 0.3 if (rank, part) == (1, place) else 0.0

    findings = told(trained(late, ranks=4, steps=200, noise=0.05))
    assert ["straggler_forward", "straggler_link"] == [finding.cause for finding in findings]
    assert findings[1].step < 130


def test_without_placed_parts_the_exchange_and_the_data_serve() -> None:
    course = (
        "step_duration_seconds[*] 1x60; communication_seconds[*] 0.3x60; "
        "communication_seconds[3] 0.01x60"
    )
    (finding,) = watched(StragglerWatcher(), course, ranks=4)
    assert (3, 19, "straggler") == (finding.rank, finding.step, finding.cause)
    assert "rank 3 is late by 290 ms a step since step 0; it costs 29.0%" in finding.reason
    course = (
        "step_duration_seconds[*] 1x60; communication_seconds[*] 0.01x60; "
        "data_wait_seconds[*] 0.01x60; data_wait_seconds[1] 0.3x60"
    )
    (finding,) = watched(StragglerWatcher(), course, ranks=2)
    assert (1, "straggler_data") == (finding.rank, finding.cause)


def test_a_window_below_the_steps_is_refused() -> None:
    with pytest.raises(Exception, match=r"straggler\.window"):
        StragglerConfig(steps=40)


def test_a_rank_without_a_core_is_told_so_once_it_has_lasted() -> None:
    """What it is late in is any part; that its thread waits for a core is why."""

    def late(step: int, rank: int, part: str) -> float:
        return 0.3 if (rank, part) == (1, "backward_seconds") and step >= 60 else 0.0

    def starved(steps: int) -> Iterator[MergedStep]:
        for merged in trained(late, ranks=3, steps=steps):
            queued = [0.0, 0.025 if merged.step >= 60 else 0.0, 0.0001]
            yield replace(merged, ranks={**merged.ranks, "run_queue_seconds": queued})

    assert [] == told(starved(200))
    (finding,) = told(starved(400))
    assert (1, "straggler_host") == (finding.rank, finding.cause)
    assert 60 <= finding.onset_step <= 100
    assert "its training thread waits 25 ms for a CPU core against 100 us of the others" in (
        finding.reason
    )


def test_lateness_that_a_little_waiting_for_a_core_does_not_explain_keeps_its_cause() -> None:
    def late(step: int, rank: int, part: str) -> float:
        return 0.3 if (rank, part) == (1, "backward_seconds") and step >= 60 else 0.0

    steps = (
        replace(merged, ranks={**merged.ranks, "run_queue_seconds": [0.0, 0.01, 0.0]})
        for merged in trained(late, ranks=3, steps=120)
    )
    (finding,) = told(steps)
    assert (1, "straggler_backward") == (finding.rank, finding.cause)


@pytest.mark.parametrize(
    ("gpus", "cause", "words"),
    [
        ({0: "GPU-a", 1: "GPU-b"}, "straggler_gpu", "; its GPU GPU-b is throttled for heat"),
        ({0: "GPU-b", 1: "GPU-a"}, "straggler_backward", ""),
        ({}, "straggler_backward", ""),
    ],
)
def test_a_throttled_gpu_is_why_its_rank_is_late(
    gpus: dict[int, str], cause: str, words: str
) -> None:
    def late(_step: int, rank: int, part: str) -> float:
        return 0.3 if (rank, part) == (1, "backward_seconds") else 0.0

    detectors = FleetDetectors()
    detectors.gpus = gpus
    clocks = {"GPU-a": {"throttle_reasons": 0}, "GPU-b": {"throttle_reasons": HARDWARE_HEAT}}
    for i in range(4):
        detectors.update_node(NodeSample(node="n", time_unix_ns=i, step=0, gpus=clocks))
    findings = [f for step in trained(late, ranks=2, steps=60) for f in detectors.update(step)]
    (finding,) = (f for f in findings if f.kind == "straggler")
    assert cause == finding.cause
    assert words in finding.reason
    assert ("GPU GPU-" in finding.reason) is bool(words)


def test_data_that_comes_late_is_no_fault_of_a_throttled_gpu() -> None:
    def late(_step: int, rank: int, part: str) -> float:
        return 0.3 if (rank, part) == (1, "data_wait_seconds") else 0.0

    detectors = FleetDetectors()
    detectors.gpus = {1: "GPU-b"}
    clocks = {"GPU-b": {"throttle_reasons": HARDWARE_HEAT}}
    for i in range(4):
        detectors.update_node(NodeSample(node="n", time_unix_ns=i, step=0, gpus=clocks))
    findings = [f for step in trained(late, ranks=2, steps=60) for f in detectors.update(step)]
    assert ["straggler_data"] == [f.cause for f in findings if f.kind == "straggler"]
