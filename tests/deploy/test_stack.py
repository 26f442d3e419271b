"""What compose would start, as plain processes from the same files, and a run through all of it."""

import json
import os
import shutil
import subprocess
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import psycopg
import pytest

from tests.deploy.compose import READ_ONLY, Stack, started
from tests.e2e.lab import open_lab, until
from trainvitals.io.client import CollectorClient, read_tokens
from trainvitals.records import Decision
from trainvitals.testing.faults import FaultPlan
from trainvitals.views import DecisionsQuestion

pytestmark = [
    pytest.mark.servers("prometheus", "prometheus-alertmanager", "postgres", "curl", "wget"),
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.timeout(600),
]

FAULTS = (
    FaultPlan()
    .nan_gradient_at(rank=1, step=70)
    .nan_loss_at(rank=0, step=90)
    .spike_gradient_at(rank=1, step=110)
    .poison_batches(first=150, last=158)
    .nan_parameters_at(rank=1, step=205)
    .kill_at(rank=1, step=240)
)
"""One of each kind that can be healed or reported; at the end, the process is killed."""
LASTING = FaultPlan().nan_parameters_at(rank=1, step=300).nan_parameters_at(rank=1, step=350)
"""After the restart: the replicas differ, and differ again after the rollback (a broken machine).

The overwritten parameters are among those that are compared at these two steps.
"""
EXPECTED = Counter(
    {
        ("skip_step", "nonfinite"): 4,
        ("skip_step", "outlier"): 1,
        ("rollback", "replica_corrupted"): 1,
        ("rollback", "nonfinite_params"): 1,
        ("halt", "replica_corrupted"): 1,
    }
)
STEPS = 380


class Pager:
    """Takes what Alertmanager sends to the two receivers of the generated configuration."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        """Receiver, alert, status."""
        told = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in body["alerts"]:
                    labels = alert["labels"]
                    name = labels.get("alert", labels["alertname"])
                    told.append((self.path.strip("/"), name, alert["status"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    def pages(self) -> list[str]:
        return [name for path, name, status in self.told if (path, status) == ("page", "firing")]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def paging() -> Iterator[Pager]:
    pager = Pager()
    try:
        yield pager
    finally:
        pager.close()


def asked(stack: Stack, query: str) -> list[dict[str, str]]:
    """Return the labels of what Prometheus answers."""
    address = f"{stack.url(9090)}/api/v1/query?query={urllib.parse.quote(query)}"
    found = httpx.get(address, trust_env=False).json()["data"]["result"]
    return [each["metric"] for each in found if float(each["value"][1])]


def in_alertmanager(stack: Stack) -> set[str]:
    found = httpx.get(f"{stack.url(9093)}/api/v2/alerts", trust_env=False).json()
    return {alert["labels"].get("alert", alert["labels"]["alertname"]) for alert in found}


def objects(stack: Stack) -> list[str]:
    """Return what is in the bucket."""
    listed = httpx.get(f"{stack.url(9000)}/vitals?list-type=2&max-keys=1000", trust_env=False)
    return [part.partition("<")[0] for part in listed.text.split("<Key>")[1:]]


def decisions(stack: Stack, run_id: str) -> list[Decision]:
    """Return what the collector answers."""
    tokens = read_tokens(stack.volume("collector") / "tokens.json")
    with CollectorClient(stack.url(8765), tokens.read, tls=tokens.tls, timeout=20.0) as client:
        return [view.decision for view in client.ask(DecisionsQuestion(run_id=run_id))]


def as_bytes(found: list[Decision]) -> bytes:
    """Return decisions as bytes: NaN is not equal to itself."""
    return msgspec.msgpack.encode(found)


def counted(stack: Stack, run_id: str) -> Counter[tuple[str, str]]:
    """Return the run's decisions in PostgreSQL, past Vitals' own reading."""
    password = (stack.compose / "secrets" / "postgres_password").read_text()
    with psycopg.connect(
        host="127.0.0.1", port=stack.ports[5432], user="vitals", password=password, dbname="vitals"
    ) as database:
        query = "SELECT action, rule FROM decisions WHERE run_id = %s"
        return Counter(database.execute(query, [run_id]).fetchall())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make its root read-only")
def test_what_runs_read_only_writes_nothing_but_below_tmp(tmp_path: Path) -> None:
    for folder, code in ((Path("/usr/share"), 1), (Path("/root"), 1), (tmp_path, 0)):
        touched = subprocess.run(
            [*READ_ONLY, "touch", folder / "written"], capture_output=True, check=False
        )
        assert code == touched.returncode, folder


def test_a_run_with_every_fault_goes_through_all_that_compose_would_start(tmp_path: Path) -> None:
    with open_lab(tmp_path) as lab, paging() as pager, started(lab, pager.port) as stack:
        # As `docker compose cp` would.
        tokens = shutil.copy(stack.volume("collector") / "tokens.json", tmp_path / "tokens.json")
        ships = {"VITALS_COLLECTOR_URL": stack.url(8765), "VITALS_TOKEN_FILE": str(tokens)}

        def train(faults: FaultPlan, **environ: str) -> None:
            ranks = ("--standalone", "--nproc-per-node", "2")
            job = lab.train(*ranks, steps=STEPS, mode="heal", faults=faults, **ships, **environ)
            assert 0 != job.wait(200), "the faults end it"

        train(FAULTS)
        run_id = lab.run_id()
        of_run = f'run="{run_id}"'
        until(lambda: ("notify", "RunFailed", "firing") in pager.told, "it is told of", 90)
        assert [] == pager.pages(), "nobody was woken: what is over needs no help at night"
        train(LASTING, VITALS_RUN_ID=run_id)
        until(lambda: "TrainingHalted" in pager.pages(), "the page comes", 90)

        until(
            lambda: asked(stack, f'train_run_state{{{of_run}, state="halted"}}'),
            "Prometheus has it",
        )
        assert asked(stack, f"train_skipped_steps_total{{{of_run}}}")
        assert asked(stack, f"train_rollbacks_total{{{of_run}}}")
        assert {"TrainingHalted", "TrainingRolledBack"} <= in_alertmanager(stack)
        decided = decisions(stack, run_id)
        assert counted(stack, run_id) == Counter((each.action, each.rule) for each in decided)
        assert EXPECTED == counted(stack, run_id)
        assert any("/data/main/steps/" in key for key in objects(stack))

        # It stands: what is killed comes back with all that it was told, and wakes nobody again.
        stack.running["collector"].kill()
        stack.running["collector"].wait()
        stack.start("collector")
        assert as_bytes(decided) == as_bytes(decisions(stack, run_id))
        assert ["TrainingHalted"] == pager.pages()
        # Nothing else is left out, and that where this machine has none.
        assert stack.not_started.keys() <= {"grafana"}
