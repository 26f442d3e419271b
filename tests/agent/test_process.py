import os
import resource
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from tests.agent.builders import identity
from trainvitals.catalog import PROCESS_METRICS
from trainvitals.testing import ManualClock
from vitals_agent.process import RankProcess

COLUMNS = {metric.column for metric in PROCESS_METRICS}


@pytest.fixture
def sleeper():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def test_a_living_rank_gives_every_column(sleeper):
    values = RankProcess(identity(pid=sleeper.pid)).sample()
    assert COLUMNS == set(values)
    assert 1 == values["alive"]
    assert values["resident_memory_bytes"] > 1e5


def test_page_faults_that_needed_a_disk_are_those_the_kernel_counts():
    values = RankProcess(identity(pid=os.getpid())).sample()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt == values["major_page_faults"]


def test_a_process_whose_files_are_not_ours_to_read_gives_what_is_open_to_all(sleeper, monkeypatch):
    process = RankProcess(identity(pid=sleeper.pid))

    def denied(*_):
        raise psutil.AccessDenied

    for name in ("io_counters", "num_fds"):
        monkeypatch.setattr(psutil.Process, name, denied)
    missing = {"io_read_bytes", "io_write_bytes", "open_fds"}
    assert COLUMNS - missing == set(process.sample())


def test_a_killed_rank_is_gone_even_while_its_parent_has_not_reaped_it(sleeper):
    process = RankProcess(identity(pid=sleeper.pid))
    assert process.alive()
    sleeper.kill()
    deadline = time.monotonic() + 60
    while process.alive():  # the kernel takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {"alive": 0} == process.sample()


def test_a_process_younger_than_the_journal_is_another_one_with_a_used_pid(sleeper):
    hour_ago = time.monotonic_ns() - 3600 * 10**9
    stale = msgspec.structs.replace(identity(pid=sleeper.pid), started_monotonic_ns=hour_ago)
    assert not RankProcess(stale).alive()


@pytest.mark.parametrize("seconds", [3_600, -3_600])
def test_a_clock_that_is_set_makes_no_living_process_a_dead_one(sleeper, seconds):
    clock = ManualClock(time_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
    clock.jump(seconds)
    assert RankProcess(identity(pid=sleeper.pid), clock=clock).alive()
    hour_ago = time.monotonic_ns() - 3600 * 10**9
    stale = msgspec.structs.replace(identity(pid=sleeper.pid), started_monotonic_ns=hour_ago)
    assert not RankProcess(stale, clock=clock).alive()


def test_a_journal_of_an_earlier_boot_has_no_process():
    earlier = msgspec.structs.replace(identity(pid=os.getpid()), boot_id="another-boot")
    assert not RankProcess(earlier).alive()


def test_a_journal_without_a_pid_has_no_process():
    assert {"alive": 0} == RankProcess(identity(pid=0)).sample()
