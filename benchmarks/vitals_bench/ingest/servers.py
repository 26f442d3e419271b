"""The servers that are sent the same records: ours, and those that others would use."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx

from trainvitals import __version__
from trainvitals.identity import new_run_id
from trainvitals.io.client import CollectorClient, read_tokens
from trainvitals.io.server_identity import UNPROVEN
from trainvitals.views import RunQuestion
from vitals_bench.ingest import remote_write
from vitals_bench.ingest.records import NAMES, RANKS_PER_NODE, Block, Writers, by_node
from vitals_bench.processes import Started, free_port, program, said_by

_TIMEOUT = 120.0
_MAX_MLFLOW_METRICS = 1_000
"""What MLflow takes in one request."""


class Request(NamedTuple):
    """What an agent posts."""

    path: str
    content: bytes
    headers: dict[str, str]


class Server(Protocol):
    """A server under test."""

    label: str
    """Name and version."""
    started: Started
    num_ranks: int
    """How many of the ranks it is sent: all but where a record takes it milliseconds."""

    def requests(self, config: str, block: Block, num_steps: int, per_node: bool) -> Posts:
        """Return what each agent posts, in its order."""
        ...

    def post(self, requests: Posts) -> None:
        """Post them, all agents at once; raise where one is refused."""
        ...

    def num_records(self, config: str) -> float:
        """Return how many whole records its query API finds."""
        ...

    def close(self) -> None:
        """Close the connections to it."""
        ...


Posts = list[list[Request]]
"""The requests of each agent."""


class Agents:
    """A connection for each node's agent, all of them at work at once."""

    def __init__(self, url: str, num_agents: int, headers: dict[str, str] | None = None) -> None:
        self._clients = [
            httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False, headers=headers)
            for _ in range(num_agents)
        ]
        self._threads = ThreadPoolExecutor(num_agents)

    def post(self, requests: Posts) -> None:
        """Post each agent's requests one after the other."""
        list(self._threads.map(self._post_all, self._clients, requests))

    def ask(self, path: str, **how: object) -> httpx.Response:
        """Return the answer to a GET."""
        answer = self._clients[0].get(path, **how)  # type: ignore[arg-type]
        return answer.raise_for_status()

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    @staticmethod
    def _post_all(client: httpx.Client, requests: Sequence[Request]) -> None:
        for path, content, headers in requests:
            answer = client.post(path, content=content, headers=headers)
            if not answer.is_success:
                raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:500]}")


def grouped(bodies: Sequence[Sequence[Request]], num_agents: int) -> Posts:
    """Return each agent's requests, of lists with one or several for each agent."""
    per_agent = [len(requests) // num_agents for requests in bodies]
    return [
        [
            request
            for requests, num in zip(bodies, per_agent, strict=True)
            for request in requests[i * num : (i + 1) * num]
        ]
        for i in range(num_agents)
    ]


class Ours:
    """The real collector."""

    def __init__(self, started: Started, url: str, tokens_file: Path, num_ranks: int) -> None:
        self.label = f"vitals {__version__}"
        self.started = started
        self.num_ranks = num_ranks
        tokens = read_tokens(tokens_file)
        self._num_agents = num_ranks // RANKS_PER_NODE
        bearer = {"Authorization": f"Bearer {tokens.ingest}"}
        self.agents = Agents(url, self._num_agents, bearer)
        self._reader = CollectorClient(UNPROVEN + url, tokens.read, timeout=_TIMEOUT)
        self._writers: dict[str, Writers] = {}

    def requests(self, config: str, block: Block, num_steps: int, per_node: bool) -> Posts:
        """Return batches as agents send them."""
        if config not in self._writers:
            self._writers[config] = Writers(
                new_run_id(time.time_ns()), range(self.num_ranks), world_size=self.num_ranks
            )
        headers = {"Content-Type": "application/octet-stream"}
        bodies = []
        for part in block.parts(num_steps):
            batches = self._writers[config].batches(part)
            bodies.append(
                [
                    Request("/v1/ingest", body, headers)
                    for body in (by_node(batches) if per_node else batches)
                ]
            )
        return grouped(bodies, self._num_agents)

    def post(self, requests: Posts) -> None:
        """Post them."""
        self.agents.post(requests)

    def num_records(self, config: str) -> float:
        """Return the rows that the run's sources have, less what was lost before them."""
        sources = self._reader.ask(RunQuestion(run_id=self._writers[config].run_id)).sources
        return sum(source.num_rows - source.num_lost_rows for source in sources)

    def close(self) -> None:
        """Close the connections."""
        self.agents.close()
        self._reader.close()


class RemoteWrite:
    """Prometheus, and what speaks as it does."""

    def __init__(self, name: str, started: Started, url: str, num_ranks: int) -> None:
        self.started = started
        self.num_ranks = num_ranks
        self._num_agents = num_ranks // RANKS_PER_NODE
        self.agents = Agents(url, self._num_agents)
        self._path = "/api/v1/write"
        self._is_victoria = name == "VictoriaMetrics"
        self.label = f"{name} {self._version()}"

    def _version(self) -> str:
        if not self._is_victoria:
            return str(self.agents.ask("/api/v1/status/buildinfo").json()["data"]["version"])
        text = self.agents.ask("/metrics").text
        match = re.search(r'vm_app_version\{version="([^"]*)"', text)
        return version_in(match[1] if match and match[1] else _package("victoria-metrics"))

    def requests(self, config: str, block: Block, num_steps: int, per_node: bool) -> Posts:
        """Return snappy-compressed write requests."""
        at_once = RANKS_PER_NODE if per_node else 1
        bodies = [
            [
                Request(
                    self._path,
                    remote_write.encode(
                        config, i, part._replace(values=part.values[i : i + at_once])
                    ),
                    remote_write.HEADERS,
                )
                for i in range(0, self.num_ranks, at_once)
            ]
            for part in block.parts(num_steps)
        ]
        return grouped(bodies, self._num_agents)

    def post(self, requests: Posts) -> None:
        """Post them."""
        self.agents.post(requests)

    def num_records(self, config: str) -> float:
        """Return the samples of all series, by the number of series of a record."""
        if self._is_victoria:
            self.agents.ask("/internal/force_flush")  # else the newest seconds are not found
        return sum(self._num_samples(f'bench_{name}{{config="{config}"}}') for name in NAMES) / len(
            NAMES
        )

    def _num_samples(self, series: str) -> float:
        asked = {"query": f"sum(count_over_time({series}[2h]))"}
        vector = self.agents.ask("/api/v1/query", params=asked).json()["data"]["result"]
        return float(vector[0]["value"][1]) if vector else 0.0

    def close(self) -> None:
        """Close the connections."""
        self.agents.close()


class MLflow:
    """The tracking server over SQLite. A request is of one run, so a rank is a run of its own."""

    def __init__(self, started: Started, url: str, num_ranks: int) -> None:
        self.started = started
        self.num_ranks = num_ranks // RANKS_PER_NODE
        self.agents = Agents(url, self.num_ranks)
        self._url = url
        self._runs: dict[str, list[str]] = {}
        self.label = f"MLflow {self.agents.ask('/version').text.strip()}"

    def requests(self, config: str, block: Block, num_steps: int, per_node: bool) -> Posts:
        """Return calls of ``log-batch``, as large as it takes them."""
        if config not in self._runs:
            self._runs[config] = [self._new_run(config, i) for i in range(self.num_ranks)]
        num = min(num_steps, _MAX_MLFLOW_METRICS // len(NAMES))
        headers = {"Content-Type": "application/json"}
        bodies = [
            [
                Request("/api/2.0/mlflow/runs/log-batch", _log_batch(run, part, i), headers)
                for i, run in enumerate(self._runs[config])
            ]
            for part in block.parts(num)
        ]
        return grouped(bodies, self.num_ranks)

    def post(self, requests: Posts) -> None:
        """Post them."""
        self.agents.post(requests)

    def num_records(self, config: str) -> float:
        """Return the values that the histories of all metrics have, by those of a record."""
        num_values = 0
        for run in self._runs[config]:
            for name in NAMES:
                asked = {"run_id": run, "metric_key": name, "max_results": "25000"}
                answer = self.agents.ask("/api/2.0/mlflow/metrics/get-history", params=asked)
                num_values += len(answer.json().get("metrics", ()))
        return num_values / len(NAMES)

    def close(self) -> None:
        """Close the connections."""
        self.agents.close()

    def _new_run(self, config: str, rank: int) -> str:
        body = {"experiment_id": "0", "run_name": f"{config}-{rank}", "start_time": 1}
        answer = httpx.post(
            f"{self._url}/api/2.0/mlflow/runs/create", json=body, timeout=_TIMEOUT, trust_env=False
        )
        return str(answer.raise_for_status().json()["run"]["info"]["run_id"])


def _log_batch(run: str, block: Block, rank: int) -> bytes:
    times = (block.time_unix_ns // 1_000_000).tolist()
    metrics = [
        {"key": name, "value": value, "timestamp": times[j], "step": block.first_step + j}
        for j, row in enumerate(block.values[rank].tolist())
        for name, value in zip(NAMES, row, strict=True)
    ]
    return json.dumps({"run_id": run, "metrics": metrics}).encode()


def _package(name: str) -> str:
    """Return the version of Debian's package, whose program does not know it."""
    if not program("dpkg-query"):
        return ""
    return said_by(["dpkg-query", "-W", "-f", "${Version}", name])


def version_in(text: str) -> str:
    """Return the first thing in a line that looks like a version; the line where none does."""
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else text


# ------------------------------------------------------------------------------------- starting


@contextmanager
def collector(
    folder: Path, *arguments: str, plain: bool = True
) -> Iterator[tuple[Started, str, Path]]:
    """Give a running collector: its process, its address and its tokens' file.

    Over plain HTTP, as what it is compared with; `transport.py` measures what TLS costs.
    """
    data = folder / "data"
    where = ("--data", str(data), *(("--allow-plain",) if plain else ()))
    args = [sys.executable, "-m", "vitals_collector", "collector", *where]
    with Started("collector", [*args, *arguments], folder) as started:
        address = data / "collector.json"
        started.wait_for(address.exists)
        yield started, json.loads(address.read_text())["url"], data / "tokens.json"


@contextmanager
def ours(folder: Path, num_ranks: int) -> Iterator[Server]:
    """Give our own server."""
    with (
        collector(folder) as (started, url, tokens),
        closing(Ours(started, url, tokens, num_ranks)) as server,
    ):
        yield server


@contextmanager
def victoria_metrics(folder: Path, num_ranks: int, binary: str) -> Iterator[Server]:
    """Give a VictoriaMetrics that receives remote writes."""
    port = free_port()
    args = [binary, f"-storageDataPath={folder / 'data'}", f"-httpListenAddr=127.0.0.1:{port}"]
    with _remote("VictoriaMetrics", args, folder, f"http://127.0.0.1:{port}", num_ranks) as server:
        yield server


@contextmanager
def prometheus(folder: Path, num_ranks: int, binary: str) -> Iterator[Server]:
    """Give a Prometheus that receives remote writes and scrapes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text("global: {}\n")
    port = free_port()
    args = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
    ]
    with _remote("Prometheus", args, folder, f"http://127.0.0.1:{port}", num_ranks) as server:
        yield server


@contextmanager
def _remote(
    name: str, args: list[str], folder: Path, url: str, num_ranks: int
) -> Iterator[RemoteWrite]:
    with Started(name, args, folder) as started:
        health = "/health" if name == "VictoriaMetrics" else "/-/ready"
        started.wait_for(lambda: _answers(url + health))
        with closing(RemoteWrite(name, started, url, num_ranks)) as server:
            yield server


@contextmanager
def mlflow(folder: Path, num_ranks: int, binary: str) -> Iterator[Server]:
    """Give an MLflow tracking server with one worker."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    args = [
        *(binary, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    env = {
        "PATH": f"{Path(binary).parent}:/usr/bin:/bin",  # it starts its workers by name
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # a queue of its own that is never idle
    }
    with Started("mlflow", args, folder, env=env) as started:
        started.wait_for(lambda: _answers(f"http://127.0.0.1:{port}/version"), 180.0)
        with closing(MLflow(started, f"http://127.0.0.1:{port}", num_ranks)) as server:
            yield server


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


class Peer(NamedTuple):
    """A peer's server, and why it cannot be started; "" where it can."""

    name: str
    binary: str
    start: Callable[[Path, int, str], AbstractContextManager[Server]]
    missing: str
    groups_nodes: bool = True
    """Whether the ranks of a node may share a request."""


def peers(mlflow_binary: str) -> list[Peer]:
    """Return the peers, each with the program that starts it."""
    named = [
        ("VictoriaMetrics", "victoria-metrics", program("victoria-metrics"), victoria_metrics),
        ("Prometheus", "prometheus", program("prometheus"), prometheus),
        ("MLflow", "mlflow", mlflow_binary or program("mlflow"), mlflow),
    ]
    listed = []
    for name, command, binary, start in named:
        missing = "" if binary else f"{name}: {command} is not on PATH"
        if binary and start is not mlflow:
            lacking = [p for p in remote_write.PACKAGES if not _has(p)]
            missing = f"{name}: {', '.join(lacking)} not installed" if lacking else ""
        listed.append(Peer(name, binary, start, missing, start is not mlflow))
    return listed


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
