"""Profiles: of whom, when nobody asked, within which bounds, and beside one of the loop's own."""

import gzip
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainer_hooks.features.profiling as profiling
from tests.support.forked import TRAINING
from tests.support.inside import events_of, feature_of, run_of
from tests.support.watched import Loop, own_place, send_command, until  # noqa: F401
from tests.trainer_hooks.ranks_profile import RANKS, SLOW, main
from tests.trainer_hooks.spawned import spawned
from trainer_hooks.features.profiling import (
    AUTO_EVERY_NS,
    AUTO_PER_RUN,
    AUTO_STEPS,
    KEPT,
    Lateness,
    ProfilingFeature,
    Slowdowns,
    slowest_and_typical,
)
from trainer_hooks.measures.settings import SignalSettings
from trainvitals.records import Note, ProfileArgument

NESTED = """
import sys, tempfile, pathlib, torch
from torch.profiler import profile, ProfilerActivity
from trainer_hooks.features.profiling import StepProfile
folder = pathlib.Path(tempfile.mkdtemp())
said, failed = [], []
def ours():
    told = {"done": said.append, "failed": failed.append}
    return StepProfile(folder / "step-000001-rank0.json.gz", num_steps=3, **told)
def theirs():
    return profile(activities=[ProfilerActivity.CPU])
if sys.argv[1] == "theirs began later":
    mine = ours()
    torch.ones(3) + 1
    with theirs() as own:
        torch.ones(4) * 2
    assert not mine.stepped()
    mine._thread.join()
    assert said and not failed, failed
else:
    with theirs() as own:
        torch.ones(4) * 2
        try:
            ours()
            raise AssertionError("ours was started")
        except Exception as error:
            assert "the loop's own" in str(error), error
own.export_chrome_trace(str(folder / "own.json"))
assert "aten::mul" in (folder / "own.json").read_text()
with theirs() as again:
    torch.ones(4) * 2
print("whole")
"""


@pytest.mark.parametrize("how", ["theirs began later", "theirs runs already"])
def test_a_profiler_of_the_loop_s_own_is_left_whole(how):
    """Two at a time end the process with a crash in torch 2.13: it is tried in another one."""
    done = TRAINING.run(
        [sys.executable, "-c", NESTED, how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "whole" in done.stdout, done.stderr
    assert 0 == done.returncode, done.stderr


@given(st.integers(1, 100), st.integers(-1, 2**20 - 1), st.booleans())
def test_what_is_ordered_travels_as_one_number(num_steps, rank, by_itself):
    wanted = ProfileArgument(num_steps, rank, by_itself)
    assert wanted == ProfileArgument.from_argument(wanted.argument)
    assert wanted.argument < 2**53


def test_the_slowest_and_one_in_the_middle_are_chosen():
    assert (0,) == slowest_and_typical([0.0])
    assert (1, 0) == slowest_and_typical([0.0, 1.0])
    assert (3, 1) == slowest_and_typical([0.3, 0.2, 0.1, 0.9, 0.25][:4])
    assert (0, 2) == slowest_and_typical([0.0, 0.0, 0.0, 0.0])


def test_who_waits_least_for_others_and_longest_for_data_is_late():
    def late(data_wait, **columns):
        lateness = Lateness()
        for _ in range(5):
            lateness.add(columns, data_wait)
        return lateness.seconds

    assert 0.0 == Lateness().seconds
    waits = {"communication_seconds": 0.01, "gradient_wait_seconds": 0.2}
    assert late(None, **waits) < late(None, **waits | {"gradient_wait_seconds": 0.02})
    assert late(0.0, communication_seconds=0.1) < late(0.3, communication_seconds=0.1)
    assert late(None, communication_seconds=None) == 0.0


@pytest.mark.dist
def test_of_three_ranks_the_slow_one_and_another_are_profiled_or_the_one_that_is_named(tmp_path):
    found = spawned(main, tmp_path, ranks=RANKS)
    assert [{}] * RANKS == [each["faults"] for each in found]
    chosen = found[0]["chosen"]
    assert 2 == len(chosen)
    assert any(f"rank{SLOW}." in name for name in chosen)
    (named,) = set(found[0]["all"]) - set(chosen)
    assert "rank2." in named


class Run:
    """A run's steps as rank 0 has them, and the orders that come of it."""

    def __init__(self, folder) -> None:
        self.slowdowns = Slowdowns(folder)
        self.folder = folder
        self.step = 0
        self.newest = 41
        self.now_ns = 10**9
        self.orders = []

    def train(self, num_steps, seconds):
        for _ in range(num_steps):
            self.slowdowns.add(self.step, 1, {"tokens_per_second": 100 / seconds}, seconds)
            self.step += 1
            order = self.slowdowns.command("RUN", newest=self.newest, now_ns=self.now_ns)
            if order is not None and order not in self.orders:
                self.orders.append(order)
            if order is not None:
                self.newest = order.number  # it was answered
                (self.folder / f"auto-step-{self.step:06d}-rank0.json.gz").touch()

    def slow_down_and_recover(self):
        self.train(600, 0.1)
        self.train(80, 0.2)
        self.train(400, 0.1)


def test_a_run_that_gets_slower_is_profiled_once_an_hour_and_three_times_at_most(tmp_path):
    run = Run(tmp_path)
    run.train(600, 0.1)
    assert [] == run.orders
    run.train(80, 0.2)
    (order,) = run.orders
    assert ("profile", 42, "vitals") == (order.action, order.number, order.issued_by)
    assert ProfileArgument(AUTO_STEPS, by_itself=True) == ProfileArgument.from_argument(
        order.argument
    )
    assert "of the run's best" in order.reason == run.slowdowns.reason
    run.train(400, 0.1)
    run.slow_down_and_recover()
    assert 1 == len(run.orders), "within the hour"
    for _ in range(4):
        run.now_ns += AUTO_EVERY_NS
        run.slow_down_and_recover()
    assert AUTO_PER_RUN == len(run.orders)


def slow_down(slowdowns, *, from_step=0):
    """Have the run's steps take twice as long."""
    for step in range(680):
        seconds = 0.1 if step < 600 else 0.2
        slowdowns.add(from_step + step, 1, {"tokens_per_second": 100 / seconds}, seconds)


def test_an_order_stands_until_it_is_answered(tmp_path):
    slowdowns = Slowdowns(tmp_path)
    slow_down(slowdowns)
    first = slowdowns.command("RUN", newest=5, now_ns=1)
    assert first is slowdowns.command("RUN", newest=5, now_ns=2)
    assert slowdowns.command("RUN", newest=6, now_ns=3) is None


ASKED = SignalSettings(profile_slowdowns=True)


def test_a_slower_run_leaves_a_trace_and_says_why():
    loop = Loop(mode="guard", signals=ASKED)
    with loop.monitor as monitor:
        controller, events = run_of(monitor), events_of(monitor)
        folder = controller.run_dir.profiles_dir
        for step in range(14):
            if step == 4:
                slow_down(feature_of(monitor, ProfilingFeature).slowdowns, from_step=1000)
            monitor.step(loop.forward())
        until(lambda: list(folder.glob("auto-step-*.json.gz")))
        until(lambda: any(isinstance(e, Note) and e.code == "profile_written" for e in events))
    (trace,) = folder.glob("*.json.gz")
    assert "traceEvents" in json.loads(gzip.decompress(trace.read_bytes()))
    notes = {event.code: event.text for event in events if isinstance(event, Note)}
    reason = feature_of(monitor, ProfilingFeature).slowdowns.reason
    assert "of the run's best" in reason
    assert f"Vitals profiles 3 steps: {reason}" == notes["profile_begun"]
    assert str(trace) in notes["profile_written"]


@pytest.mark.parametrize(
    "how", [{"mode": "observe", "signals": ASKED}, {"mode": "guard"}], ids=["observe", "default"]
)
def test_who_only_observes_or_did_not_ask_for_it_orders_none(how):
    with Loop(**how).monitor as monitor:
        assert feature_of(monitor, ProfilingFeature).slowdowns is None


def test_a_trace_that_is_too_large_is_not_kept_and_that_is_counted(monkeypatch):
    monkeypatch.setattr(profiling, "MAX_BYTES", 100)
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        controller = run_of(monitor)
        for step in range(8):
            if step == 2:
                send_command(monitor, action="profile", argument=2.0)
            monitor.step(loop.forward())
        until(lambda: controller.faults.counts.get("profile"))
        assert [] == list(controller.run_dir.profiles_dir.iterdir())


def test_of_one_rank_s_traces_the_newest_are_kept(tmp_path):
    paths = [tmp_path / f"step-{n:06d}-rank1.json.gz" for n in range(KEPT + 3)]
    other = tmp_path / "step-000000-rank0.json.gz"
    for path in (other, *paths):
        path.touch()
    profiling.delete_old_traces(paths[-1])
    assert KEPT + 1 == len(list(tmp_path.glob("step-*")))
    assert other.exists()
