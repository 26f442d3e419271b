import threading

import pytest

from tests.support.agent_clients import Later
from vitals_agent.sampling import DetachedCall


def test_a_result_is_there_once_the_call_has_come_back_and_is_taken_once():
    later = Later()
    aside = DetachedCall("a call", lambda: 7, spawn=later)
    assert (True, None, 3.0) == (aside.start(10.0), aside.pop_result(), aside.seconds_out(13.0))
    later.finish()
    assert (7, None, 0.0) == (aside.pop_result(), aside.pop_result(), aside.seconds_out(99.0))


def test_while_a_call_is_out_no_other_is_begun():
    later = Later()
    aside = DetachedCall("a call", lambda: 7, spawn=later)
    assert [True, False, False] == [aside.start(float(now)) for now in range(3)]
    assert 1 == len(later.begun)
    later.finish()
    assert not aside.start(3.0)  # its result was not taken yet
    aside.pop_result()
    assert aside.start(4.0)


def test_an_error_is_raised_where_the_result_is_taken():
    aside = DetachedCall("a call", lambda: 1 / 0, spawn=lambda name, function: function())
    aside.start(0.0)
    with pytest.raises(ZeroDivisionError):
        aside.pop_result()
    assert aside.start(1.0)


def test_where_no_thread_can_be_had_the_next_call_tries_again():
    tries = []

    def spawn(name, function):
        tries.append(name)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        function()

    aside = DetachedCall("a call", lambda: 7, spawn=spawn)
    with pytest.raises(RuntimeError):
        aside.start(0.0)
    assert (True, 7) == (aside.start(1.0), aside.pop_result())


def test_a_call_that_hangs_is_on_a_thread_that_the_end_of_the_process_does_not_wait_for():
    go_on, seen = threading.Event(), []
    done = threading.Event()

    def call():
        seen.append(threading.current_thread())
        go_on.wait()
        done.set()
        return 7

    aside = DetachedCall("a-call", call)
    aside.start(0.0)
    assert aside.pop_result() is None
    go_on.set()
    assert done.wait(20.0)
    seen[0].join(20.0)
    assert (7, "a-call", True) == (aside.pop_result(), seen[0].name, seen[0].daemon)
