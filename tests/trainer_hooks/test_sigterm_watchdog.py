"""The wakeup descriptor is taken where nobody has it, and given back as it is found."""

import os
import signal
import threading
from pathlib import Path

import pytest

from trainer_hooks.lifecycle.sigterm_watchdog import SigtermWatchdog


@pytest.fixture
def theirs():
    """The descriptor of an event loop, which nobody has taken yet."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    yield writer
    signal.set_wakeup_fd(-1)
    os.close(reader)
    os.close(writer)


def watching():
    return [t for t in threading.enumerate() if t.name == "vitals-grace"]


def num_open():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_where_an_event_loop_has_it_nothing_is_taken_and_nothing_left_open(theirs):
    signal.set_wakeup_fd(theirs)
    before = num_open()
    grace = SigtermWatchdog(lambda: None, seconds=1)
    assert (False, before, []) == (grace.available, num_open(), watching())
    grace.close()
    assert theirs == signal.set_wakeup_fd(-1)


def test_an_event_loop_that_took_it_later_keeps_it(theirs):
    grace = SigtermWatchdog(lambda: None, seconds=1)
    signal.set_wakeup_fd(theirs)
    grace.close()
    assert theirs == signal.set_wakeup_fd(-1)


def test_it_ends_though_a_forked_worker_holds_its_descriptors():
    before = num_open()
    grace = SigtermWatchdog(lambda: None, seconds=1)
    (thread,) = watching()
    hold, release = os.pipe()
    child = os.fork()
    if not child:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    grace.close()
    thread.join()
    os.close(release)
    os.waitpid(child, 0)
    assert before == num_open()
    assert -1 == signal.set_wakeup_fd(-1)


def test_other_signals_and_an_answer_in_time_are_no_reason_to_act():
    acts, handler = [], signal.signal(signal.SIGTERM, lambda *_: None)
    usual = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        grace = SigtermWatchdog(lambda: acts.append(1), seconds=60)
        (thread,) = watching()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        grace.cancel()
        os.kill(os.getpid(), signal.SIGTERM)
        grace.close()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGUSR1, usual)
    assert [] == acts


def test_without_an_answer_it_acts_once():
    acts, handler = threading.Semaphore(0), signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        grace = SigtermWatchdog(acts.release, seconds=0)
        (thread,) = watching()
        os.kill(os.getpid(), signal.SIGTERM)
        assert acts.acquire(timeout=60)
        os.kill(os.getpid(), signal.SIGTERM)
        grace.close()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not acts.acquire(blocking=False)
