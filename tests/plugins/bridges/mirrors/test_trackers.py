"""What a mirror wrote, read back by each tracker's own reader: same values, same steps."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.collector.rows import RUN
from tests.plugins.bridges.mirrors.scene import FORK, HOSTILE, SECRET, Scene, same
from vitals_plugins.bridges.importers.wandb_file import _read_leveldb_records

pytestmark = pytest.mark.integrations

Point = tuple[int, int, str]
"""Attempt, step, name."""

NEEDED = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "mlflow folder": "mlflow",
    "trackio": "trackio",
}


class Place:
    """One tracker's own folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.target = {
            "tensorboard": f"tensorboard:{folder}",
            "wandb": "wandb:vitals-test",
            "mlflow": f"mlflow:sqlite:///{folder}/mlflow.db",
            "mlflow folder": f"mlflow:{folder}/store",
            "trackio": "trackio:vitals-test",
        }[kind]
        self.environ = {
            **os.environ,
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            "TRACKIO_DIR": str(folder),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "XDG_DATA_HOME": str(folder / "data"),
            "HOME": str(folder),
        }
        if kind == "mlflow":
            pytest.importorskip("sqlalchemy")

    def read(self) -> Iterator[tuple[Point, float]]:
        yield from READERS[self.kind](self)


def of_tensorboard(place: Place) -> Iterator[tuple[Point, float]]:
    """What is shown of each folder: the start of a session purges all from its step on."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    folders = [
        folder for folder, _, files in os.walk(place.folder) if any("tfev" in f for f in files)
    ]
    for folder in sorted(folders):
        shown: list[tuple[int, dict[str, float]]] = []
        for path in sorted(Path(folder).glob("*tfevents*")):
            for event in LegacyEventFileLoader(str(path)).Load():
                if event.HasField("session_log"):
                    shown = [row for row in shown if row[0] < event.step]
                found = {
                    value.tag: float(make_ndarray(value.tensor).item())
                    for value in event.summary.value
                    if value.metadata.plugin_data.plugin_name == "scalars"
                    or not value.metadata.plugin_data.plugin_name
                }
                shown.append((event.step, found))
        for step, found in shown:
            yield from of_row(found, step)


def of_row(found: dict[str, float], step: int) -> Iterator[tuple[Point, float]]:
    attempt = int(found.get("vitals/attempt", 0))
    for name, value in found.items():
        if not name.startswith("vitals/"):
            yield (attempt, step, name), value


def of_wandb(place: Place) -> Iterator[tuple[Point, float]]:
    """By wandb's own messages; its Python package no longer reads the frames around them."""
    from wandb.proto import wandb_internal_pb2 as messages

    for path in sorted(place.folder.glob("wandb/offline-run-*/run-*.wandb")):
        for raw in _read_leveldb_records(memoryview(path.read_bytes()), []):
            record = messages.Record.FromString(raw)
            if not record.HasField("history"):
                continue
            cells = {".".join(i.nested_key) or i.key: _cell(i) for i in record.history.item}
            numbers = {k: float(v) for k, v in cells.items() if v is not None and k[0] != "_"}
            step = int(numbers.pop("vitals/step"))
            yield from of_row(numbers, step)


def _cell(item) -> object:
    if item.value_json:
        value = json.loads(item.value_json)
        return (
            float(value)
            if value in ("NaN", "Infinity", "-Infinity")
            else (None if isinstance(value, str) else value)
        )
    kind = item.WhichOneof("value")
    value = getattr(item, kind) if kind else None
    return None if isinstance(value, str) else value


def of_mlflow(place: Place) -> Iterator[tuple[Point, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=place.target.partition(":")[2])
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    histories = {
        name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
    }
    attempts = {
        (metric.step, metric.timestamp): int(metric.value) for metric in histories["vitals/attempt"]
    }
    for name, history in histories.items():
        for metric in history if not name.startswith("vitals/") else ():
            attempt = attempts[metric.step, metric.timestamp]
            yield (attempt, metric.step, name), metric.value


def of_trackio(place: Place) -> Iterator[tuple[Point, float]]:
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as store; "
        f"print('\\n' + json.dumps(store.get_logs('vitals-test', run_id='{RUN}')))"
    )
    made = subprocess.run(
        [sys.executable, "-c", program],
        env=place.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    for row in json.loads(made.stdout.splitlines()[-1]):
        found = {k: float(v) for k, v in row.items() if k not in ("step", "timestamp")}
        yield from of_row(found, row["step"])


READERS: dict[str, Callable[[Place], Iterator[tuple[Point, float]]]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "mlflow folder": of_mlflow,
    "trackio": of_trackio,
}


@pytest.fixture(params=sorted(NEEDED))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for its readers here
    pytest.importorskip(NEEDED[request.param], reason=f"needs {NEEDED[request.param]}")
    folder = tmp_path / request.param
    folder.mkdir()
    return Place(request.param, folder)


def command(run: Path, place: Place) -> list[str]:
    return [sys.executable, "-m", "trainvitals", "mirror", str(run), "--to", place.target]


def mirror(run: Path, place: Place) -> str:
    made = subprocess.run(
        command(run, place),
        env=place.environ,
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert 0 == made.returncode, made.stderr
    return made.stderr


def test_all_values_are_read_back_bit_by_bit_at_their_steps(place: Place, tmp_path: Path):
    scene = Scene(tmp_path / "runs", name=HOSTILE)
    scene.whole()
    mirror(scene.run_dir.path, place)
    points = list(place.read())
    assert dict.fromkeys(scene.values, 1) == Counter(point for point, _ in points)
    expected = scene.values
    if place.kind == "mlflow":  # its databases hold no infinity
        expected = {
            k: max(min(v, sys.float_info.max), -sys.float_info.max) for k, v in expected.items()
        }
    assert same(expected, dict(points))
    for path in place.folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def notes_of(place: Place) -> list[str]:
    """Return what the tracker says of decisions."""
    match place.kind:
        case "tensorboard":
            return [path.read_text(errors="replace") for path in place.folder.rglob("*.vitals")]
        case "wandb":
            from wandb.proto import wandb_internal_pb2 as messages

            raws = [
                raw
                for path in place.folder.glob("wandb/offline-run-*/run-*.wandb")
                for raw in _read_leveldb_records(memoryview(path.read_bytes()), [])
            ]
            records = [messages.Record.FromString(raw) for raw in raws]
            assert ["WARN"] == [r.alert.level for r in records if r.HasField("alert")]
            assert {RUN} == {r.run.run_id for r in records if r.HasField("run")}  # resumed
            names = [m.metric.glob_name for m in records if m.HasField("metric")]
            assert "*" in names  # everything is drawn over vitals/step
            return [str(record.history) for record in records if record.HasField("history")]
        case "mlflow" | "mlflow folder":
            from mlflow.tracking import MlflowClient

            client = MlflowClient(tracking_uri=place.target.partition(":")[2])
            (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
            assert ("FINISHED", "tiny") == (run.info.status, run.info.run_name)
            assert "adamw" == run.data.params["optimizer"]
            return list(run.data.tags.values())
    program = (
        "import json, trackio; run, = trackio.Api().runs('vitals-test'); "
        "assert run.config['optimizer'] == 'adamw', run.config; "
        "print('\\n' + json.dumps(run.alerts()))"
    )
    made = subprocess.run(
        [sys.executable, "-c", program],
        env=place.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return [alert["text"] for alert in json.loads(made.stdout.splitlines()[-1])]


def test_decisions_are_told_where_the_tracker_tells_such(place: Place, tmp_path: Path):
    scene = Scene(tmp_path / "runs")
    scene.whole()
    mirror(scene.run_dir.path, place)
    mirror(scene.run_dir.path, place)  # once more: nothing is new
    told = "\n".join(notes_of(place))
    assert "rolled back to step 20: NaN weights" in told
    assert "attempt 2 begins at step 20" in told
    assert dict.fromkeys(scene.values, 1) == Counter(point for point, _ in place.read())


DYING = """
import os, sys
from vitals_plugins.bridges.mirrors import worker

save = worker.MirrorStateFile.save

def die(self, saved):
    if not saved.is_writing and saved.num_rows:
        os._exit(9)
    save(self, saved)

worker.MirrorStateFile.save = die
from trainvitals.cli.main import main
main(sys.argv[1:])
"""


def test_what_is_in_the_tracker_and_not_saved_as_written_is_not_written_again(
    place: Place, tmp_path: Path
):
    """The worker dies in between, the worst moment there is."""
    scene = Scene(tmp_path / "runs")
    scene.whole()
    pipe, theirs = os.pipe()
    worker = [sys.executable, "-c", DYING, *command(scene.run_dir.path, place)[3:]]
    died = subprocess.run(
        [*worker, "--worker", str(theirs)],
        pass_fds=[theirs],
        env=place.environ,
        cwd=place.folder,
        timeout=120,
    )
    assert 9 == died.returncode
    os.close(pipe)
    os.close(theirs)
    assert list(place.read()), "it died too early"
    mirror(scene.run_dir.path, place)
    assert dict.fromkeys(scene.values, 1) == Counter(point for point, _ in place.read())


def test_a_mirror_that_is_killed_again_and_again_writes_each_row_once(place: Place, tmp_path: Path):
    """Supervisor and workers get SIGKILL at any moment while the run goes on."""
    scene = Scene(tmp_path / "runs", is_live=True)
    scene.first()
    num_rounds, written = 0, 0

    def train() -> None:
        time.sleep(1.0)
        scene.back()
        first = FORK
        while num_rounds < 4 or first < 200:
            scene.steps(first, first + 20, attempt=2)
            first += 20
            time.sleep(0.3)
        scene.end()

    def rows_written() -> int:
        states = list(scene.run_dir.path.glob("mirrors/*.json"))
        return json.loads(states[0].read_text())["num_rows"] if states else 0

    training = threading.Thread(target=train)
    training.start()
    chance = random.Random(1)
    while num_rounds < 4:
        process = subprocess.Popen(
            command(scene.run_dir.path, place),
            env=place.environ,
            cwd=place.folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert wait_for(lambda before=written: rows_written() > before), "it does not go on"
        time.sleep(chance.uniform(0.0, 2.5))  # somewhere in the next look, or between two
        for pid in [*children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        num_rounds, written = num_rounds + 1, rows_written()
    training.join()
    mirror(scene.run_dir.path, place)
    assert dict.fromkeys(scene.values, 1) == Counter(point for point, _ in place.read())


def children(pid: int) -> list[int]:
    """Return all processes below one."""
    try:
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in own] + [c for child in own for c in children(int(child))]


def test_tensorboard_shows_the_lineage_and_beside_it_what_was_rolled_back(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    place = Place("tensorboard", tmp_path / "tb")
    scene = Scene(tmp_path / "runs", is_live=True)
    scene.first()
    live = subprocess.Popen(
        command(scene.run_dir.path, place), env={**place.environ, "HOME": str(tmp_path)}
    )
    folder = wait_for(lambda: next(place.folder.glob("tiny-*"), None))
    wait_for(
        lambda: any(
            "vitals/decisions" in f.read_text(errors="replace") for f in folder.glob("*.vitals")
        )
    )
    scene.back()
    scene.then()
    scene.end()
    assert 0 == live.wait(60)
    seen = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    aside = EventAccumulator(str(folder / "rolled_back"), size_guidance={"tensors": 0}).Reload()
    curve = {
        (e.step, "train/loss"): e.tensor_proto.double_val[0] for e in seen.Tensors("train/loss")
    }
    assert same({k: v for k, v in scene.lineage().items() if k[1] == "train/loss"}, curve)
    left = {e.step: e.tensor_proto.double_val[0] for e in aside.Tensors("train/loss")}
    assert list(range(FORK, 41)) == sorted(left)
    texts = [e.tensor_proto.string_val[0].decode() for e in seen.Tensors("vitals/decisions")]
    assert any("rolled back to step 20: NaN weights" in text for text in texts), texts


def wait_for(find):
    for _ in range(300):
        if found := find():
            return found
        time.sleep(0.1)
    raise AssertionError("it does not come")


def test_a_real_tracker_whose_server_never_answers_is_ended_and_told(tmp_path: Path):
    pytest.importorskip("mlflow", reason="needs mlflow")
    from vitals_plugins.bridges.mirrors.supervise import supervise
    from vitals_plugins.bridges.mirrors.worker import TrackerTarget

    scene = Scene(tmp_path / "runs")
    scene.whole()
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(KeyboardInterrupt):
        supervise(
            [TrackerTarget("mlflow", f"http://127.0.0.1:{server.getsockname()[1]}")],
            lambda target, pipe: [
                *(sys.executable, "-m", "trainvitals", "mirror", str(scene.run_dir.path)),
                *("--to", str(target), "--worker", str(pipe)),
            ],
            say=say,
            hang_seconds=4.0,
            start_seconds=0.0,
        )
    assert all("shows no sign of life for 4 s; the training is not affected" in t for t in told)
    assert ["1 s", "2 s"] == [text.split("Next try in ")[1].split(",")[0] for text in told]


@pytest.mark.parametrize(
    ("kind", "module"),
    [("otlp", "opentelemetry.exporter.otlp.proto.http"), ("mlflow", "mlflow")],
)
def test_a_server_that_fails_with_100_mb_is_reported_in_bounded_memory_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
):
    pytest.importorskip(module, reason=f"needs {module}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # its seven take four minutes
    from vitals_plugins.bridges.mirrors.supervise import supervise
    from vitals_plugins.bridges.mirrors.worker import TrackerTarget

    scene = Scene(tmp_path / "runs")
    scene.whole()
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            raise KeyboardInterrupt

    log, peak = tmp_path / "log", tmp_path / "peak"
    worker = (
        "import resource, subprocess, sys; code = subprocess.run(sys.argv[2:], close_fds=False)"
        ".returncode; peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss;"
        " open(sys.argv[1], 'a').write(f'{peak}\\n'); sys.exit(code)"
    )
    with (
        _failing_server() as url,
        log.open("ab") as output,
        redirected(output),
        pytest.raises(KeyboardInterrupt),
    ):
        supervise(
            [TrackerTarget(kind, url)],
            lambda target, pipe: [
                *(sys.executable, "-c", worker, str(peak)),
                *(sys.executable, "-m", "trainvitals", "mirror", str(scene.run_dir.path)),
                *("--to", str(target), "--worker", str(pipe)),
            ],
            say=say,
        )
    assert all("failed (exit code 1" in text for text in told), told
    assert ["1 s", "2 s"] == [text.split("Next try in ")[1].split(",")[0] for text in told]
    assert log.stat().st_size < 1 << 16
    if kind == "otlp":  # MLflow's own client reads the whole response
        assert max(map(int, peak.read_text().split())) < 300 << 10


@contextlib.contextmanager
def _failing_server() -> Iterator[str]:
    """Give the URL of a server that responds to each request with 500 and 100 MB."""

    class Failing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(500)
            self.send_header("Content-Length", str(100 << 20))
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x" * (1 << 20))

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def redirected(output: BinaryIO) -> Iterator[None]:
    """Send what this process's children write to stderr to a file."""
    before = os.dup(2)
    os.dup2(output.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_over_otlp_each_value_arrives_with_its_step_and_time(tmp_path: Path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the OTLP exporter")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    received: list[ExportMetricsServiceRequest] = []
    num_refused = 0

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal num_refused
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            is_taken = num_refused > 0
            num_refused += 1
            if is_taken:
                received.append(ExportMetricsServiceRequest.FromString(raw))
            self.send_response(200 if is_taken else 400)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    scene = Scene(tmp_path / "runs")
    scene.whole()
    place = Place("tensorboard", tmp_path)
    place.target = f"otlp:http://127.0.0.1:{server.server_port}"
    said = mirror(scene.run_dir.path, place)
    server.shutdown()
    server.server_close()
    assert "failed (exit code 1" in said  # it was refused once, and tried again
    seen: dict[tuple[int, int, str], float] = {}
    times = {(attempt, t): step for attempt, step, t in _times(scene)}
    for request in received:
        (resource,) = request.resource_metrics
        attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
        assert ("vitals", RUN, "tiny") == tuple(
            attributes[key] for key in ("service.name", "vitals.run_id", "vitals.run_name")
        )
        for metric in resource.scope_metrics[0].metrics:
            for point in metric.gauge.data_points:
                (attempt,) = (a.value.int_value for a in point.attributes if a.key == "attempt")
                step = times[attempt, point.time_unix_nano]
                seen[attempt, step, metric.name] = point.as_double
    names = {"train/loss": "train_loss", "train/grad_norm": "train_grad_norm"}
    expected = {
        (attempt, step, names.get(name, f"train_scalar/{name}")): value
        for (attempt, step, name), value in scene.values.items()
    }
    assert same(expected, {k: v for k, v in seen.items() if k[2] in {e[2] for e in expected}})
    assert all(value == step for (_, step, name), value in seen.items() if name == "train_step")


def _times(scene: Scene) -> Iterator[tuple[int, int, int]]:
    for attempt, step, _ in scene.values:
        earlier = 0 if attempt == 2 else 50 * 10**9
        yield attempt, step, scene.rank.time_of(step) - earlier
