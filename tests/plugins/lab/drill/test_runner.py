"""Processes and alerts of a drill, without a training."""

import signal
import subprocess
import sys
import time

import httpx
import psutil

from tests.support.receivers import alert as stored_alert
from trainvitals.views import AlertView
from vitals_plugins.lab.drill.receiver import local_receiver
from vitals_plugins.lab.drill.runner import adopt_orphans, end_processes

PARENT = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], stdout=s.DEVNULL).pid)"
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_its_parent_left_is_ended_with_the_drill():
    with adopt_orphans():
        done = subprocess.run(
            [sys.executable, "-c", PARENT, *SLEEPER], stdout=subprocess.PIPE, text=True, check=True
        )
        orphan = psutil.Process(int(done.stdout))
        assert orphan.is_running()
    assert not psutil.pid_exists(orphan.pid)


def test_a_stopped_process_is_ended():
    process = subprocess.Popen(SLEEPER)
    process.send_signal(signal.SIGSTOP)
    until(lambda: psutil.STATUS_STOPPED == psutil.Process(process.pid).status())
    end_processes([process.pid])
    assert not psutil.pid_exists(process.pid)
    process.wait()


def test_the_receiver_stores_alerts_of_a_run_that_fire():
    firing, resolved = stored_alert(), stored_alert("f2", "resolved")
    with local_receiver() as receiver, httpx.Client() as client:
        body = {"version": 1, "alerts": [as_body(firing), as_body(resolved)]}
        assert 200 == client.post(receiver.url, json=body).status_code
        assert 400 == client.post(receiver.url, content=b"{").status_code
        (received,) = receiver.firing(firing.run_id)
        assert (firing.name, "page") == (received.name, received.severity)
        assert received.received_unix_ns > 0
        assert [] == receiver.firing("another run")


def as_body(alert: AlertView) -> dict[str, object]:
    return {name: getattr(alert, name) for name in alert.__struct_fields__}
