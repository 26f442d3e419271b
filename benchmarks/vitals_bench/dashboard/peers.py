"""The same million points in TensorBoard and MLflow: what each answers, how soon, and what of it.

Asked is what their pages ask for one curve. Where a spike is not in the answer, no page draws it.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from vitals_bench import wide
from vitals_bench.dashboard.asked import Asked
from vitals_bench.dashboard.seen import num_hidden
from vitals_bench.dashboard.serving import FULL, QUICK, answers
from vitals_bench.processes import Started, free_port, program, said_by
from vitals_bench.query.filling import Filling, Planted, pieces
from vitals_bench.query.measure import Asking
from vitals_bench.rows import Row

_TIMES = 5
_WAIT_SECONDS = 600.0
_TIMEOUT_SECONDS = 120.0
_MLFLOW_POINTS = 320
"""Points of a curve that MLflow's page asks for."""
Ask = Callable[[], bytes]

_WRITE_EVENTS = """
import sys
import numpy
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(sys.argv[2])
for step, value in enumerate(numpy.fromfile(sys.argv[1])):
    summary = Summary(value=[Summary.Value(tag="loss", simple_value=value)])
    writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=summary))
writer.close()
"""


def measure_peers(*, quick: bool, asked: Asked | None = None) -> Iterator[Row]:
    """Yield of each peer how many of the planted spikes are not in what it answers."""
    asked, size = asked or Asked(), QUICK if quick else FULL
    planted = Filling(size).planted
    values = np.concatenate([piece[:, 0] for _, piece in pieces(size, planted)])
    with TemporaryDirectory(prefix="vitals-bench-") as name:
        folder = Path(name)
        with wide.sqlite_store(folder, "ours") as store:
            filling = Filling(size, ("loss", "grad_norm", *Filling(size).names[2:]))
            filling.fill(store)
            asking = Asking(store, filling)
            ours = _asked(lambda: str(asking.overview().value).encode(), planted)
        for peer, binary, start in (
            ("TensorBoard", asked.tensorboard or program("tensorboard"), tensorboard),
            ("MLflow", asked.mlflow or program("mlflow"), mlflow),
        ):
            if binary:
                with start(folder / peer, binary, values) as ask:
                    theirs = _asked(ask, planted)
                match = re.search(r"\d+\.\d+[\w.]*", said_by([binary, "--version"]))
                version = f"{peer} {match[0] if match else 'of an unknown version'}"
                yield from _rows(peer, version, len(values), planted, ours, theirs)
            else:
                yield Row(name=_name(len(values), planted), ours=None, unit="", peer=peer,
                          note=f"{peer}: not installed")  # fmt: skip


class _Answered:
    """What a curve's answer lacks, how long it took, how large it is."""

    def __init__(self, hidden: int, seconds: float, num_bytes: int) -> None:
        self.hidden, self.seconds, self.num_bytes = hidden, seconds, num_bytes


def _asked(ask: Ask, planted: Planted) -> _Answered:
    times = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        raw = ask()
        times.append(time.perf_counter() - begin)
    return _Answered(num_hidden(raw, planted), statistics.median(times), len(raw))


def _name(num: int, planted: Planted) -> str:
    return f"of {len(planted.spikes)} one-step spikes in {num:,} points, not in a curve's answer"


def _rows(
    peer: str, version: str, num: int, planted: Planted, ours: _Answered, theirs: _Answered
) -> Iterator[Row]:
    yield Row(
        name=_name(num, planted),
        ours=float(ours.hidden),
        unit="of them",
        peer=peer,
        theirs=float(theirs.hidden),
        note=f"{version}; theirs has {theirs.num_bytes / 1024:.0f} KiB",
    )
    yield Row(
        name=f"time of that answer, {num:,} points",
        ours=1e3 * ours.seconds,
        unit="ms",
        peer=peer,
        theirs=1e3 * theirs.seconds,
        note="wall time; theirs over HTTP on loopback, ours the query alone; loading and start "
        "of theirs are not in it",
    )


@contextlib.contextmanager
def tensorboard(folder: Path, binary: str, values: npt.NDArray[np.float64]) -> Iterator[Ask]:
    """Give what asks a TensorBoard that has loaded the values."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    values.tofile(folder / "values.bin")
    python = str(Path(binary).parent / "python")
    command = [python, "-c", _WRITE_EVENTS, str(folder / "values.bin"), str(logs)]
    subprocess.run(command, check=True, timeout=_WAIT_SECONDS)
    port = free_port()
    args = [binary, "--logdir", str(logs), "--port", str(port), "--host", "127.0.0.1"]
    with Started("tensorboard", args, folder) as started:
        url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run=.&tag=loss"
        last = len(values) - 1
        started.wait_for(lambda: _last_step(url) == last, _WAIT_SECONDS)
        yield lambda: _get(url)


def _last_step(url: str) -> int:
    try:
        points = json.loads(_get(url))
    except (httpx.HTTPError, ValueError):
        return -1
    return int(points[-1][1]) if points else -1


@contextlib.contextmanager
def mlflow(folder: Path, binary: str, values: npt.NDArray[np.float64]) -> Iterator[Ask]:
    """Give what asks an MLflow with the values in its database."""
    folder.mkdir(parents=True)
    port = free_port()
    url, database = f"http://127.0.0.1:{port}", folder / "mlflow.db"
    args = [
        *(binary, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{database}"),
    ]
    env = {
        "PATH": f"{Path(binary).parent}:/usr/bin:/bin",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with Started("mlflow", args, folder, env=env) as started:
        started.wait_for(lambda: answers(f"{url}/version"), _WAIT_SECONDS)
        run_id = _mlflow_run(url)
        _fill_mlflow(database, run_id, values)
        asked = f"run_ids={run_id}&metric_key=loss&max_results={_MLFLOW_POINTS}"
        path = "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"
        yield lambda: _get(f"{url}{path}?{asked}")


def _mlflow_run(url: str) -> str:
    body = {"experiment_id": "0", "start_time": 1}
    answer: Any = httpx.post(
        f"{url}/api/2.0/mlflow/runs/create",
        json=body,
        timeout=_TIMEOUT_SECONDS,
        trust_env=False,
    ).json()
    return str(answer["run"]["info"]["run_id"])


def _fill_mlflow(database: Path, run_id: str, values: npt.NDArray[np.float64]) -> None:
    """Write the points into its table: through its API a million of them would take minutes."""
    insert = "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan)"
    kept = np.nan_to_num(values, nan=0.0, posinf=1.7976931348623157e308).tolist()
    is_nan = np.isnan(values).tolist()
    rows = (
        ("loss", value, 1_700_000_000_000 + 1_000 * step, run_id, step, is_nan[step])
        for step, value in enumerate(kept)
    )
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        connection.executemany(f"{insert} VALUES (?, ?, ?, ?, ?, ?)", rows)


def _get(url: str) -> bytes:
    answer = httpx.get(url, timeout=_TIMEOUT_SECONDS, trust_env=False)
    answer.raise_for_status()
    return answer.content
