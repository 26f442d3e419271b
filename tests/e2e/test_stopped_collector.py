"""The collector is stopped for two minutes: the agent keeps the rows, and each is stored once."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent.builders import NODE, RUN
from tests.e2e.lab import free_port, open_lab, stored_rows, until
from trainvitals.io.private import private_base
from trainvitals.views import AlertsQuestion, RunQuestion

pytestmark = pytest.mark.slow

STOPPED_SECONDS = 125.0


@pytest.mark.timeout(900)
def test_a_collector_that_stands_for_two_minutes_costs_no_row_and_no_page(tmp_path: Path) -> None:
    with open_lab(tmp_path) as lab:
        lab.runs.mkdir(parents=True)
        port = free_port()
        collector = lab.collector(port)
        agent = lab.agent(port, "--node", NODE)
        base = private_base(lab.environ())
        rank = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.agent.rank_main", str(base), str(lab.runs), "0"),
                *("--every", "0.05"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=lab.environ(),
        )
        lab.processes.append(rank)

        def steps() -> list[int]:
            keys = (key for key, _ in stored_rows(lab.data).elements())
            return sorted(
                seq for source, _, stream, seq in keys if (source, stream) == ("rank:0", "steps")
            )

        until(steps, "steps are stored")
        collector.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        assert (None, None) == (agent.poll(), rank.poll())
        collector.send_signal(signal.SIGCONT)
        rank.communicate(b"end\n")
        written = int.from_bytes((lab.runs / RUN / "0.progress").read_bytes(), "little")
        assert written > STOPPED_SECONDS
        until(lambda: len(steps()) >= written, "what was written meanwhile is stored")
        assert list(range(written)) == steps()
        with lab.client(port) as client:
            until(
                lambda: client.ask(RunQuestion(run_id=RUN)).summary.state == "finished",
                "the run is seen to end",
            )
            detail = client.ask(RunQuestion(run_id=RUN))
            alerts = client.ask(AlertsQuestion(run_id=RUN))
        assert {0} == {source.num_lost_rows for source in detail.sources}
        assert [] == [alert.name for alert in alerts if alert.severity == "page"]
