"""Runs the parts of the GPU check, each in its own process, and stores the result after each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from trainvitals.errors import StorageError, UsageError
from vitals_bench.gpu.child import MACHINE
from vitals_bench.gpu.parts import GROUP_SECONDS, MAX_SECONDS, Facts, Part, load_parts
from vitals_bench.gpu.report import make_text
from vitals_bench.processes import free_port

ROOT = Path(__file__).parents[3]
"""The checkout."""
RESULT_NAME = "gpu_check.json"
TEXT_NAME = "gpu_check.txt"
_LAST_LINES = 12
_MIN_PART_SECONDS = 5.0
_MACHINE_SECONDS = 300.0


class Request(NamedTuple):
    """Parts to run, and where their results are stored."""

    out: Path
    groups: tuple[str, ...] = tuple(GROUP_SECONDS)
    only: tuple[str, ...] = ()
    """Names of parts; empty: all of the groups."""
    is_resumed: bool = False
    """Whether parts that passed earlier are left out."""
    jobs: int = 0
    """Parts at a time; 0: 5 with a GPU, otherwise 1."""
    limit_seconds: float = MAX_SECONDS
    commit: str = ""
    """Revision of the code; empty: that of the checkout."""


class RankJob(NamedTuple):
    """Environment of the ranks of one job."""

    num_ranks: int
    has_own_gpus: bool

    def environments(self) -> Iterator[dict[str, str]]:
        """Yield the environment of each rank."""
        port = str(free_port())
        for rank in map(str, range(self.num_ranks)):
            yield {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": str(self.num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GPU_CHECK_INDEX": rank if self.has_own_gpus else "0",
            }


def run_part(
    name: str, limit_seconds: float | None, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one part in its own process and directory; return its result.

    Args:
        name: the part, or ``MACHINE``.
        limit_seconds: time after which the process and its children are killed; None: no limit,
            because the part that started it has one.
        environ: additional variables.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as directory:
        out = Path(directory, "part.json")
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
        variables = {
            **os.environ,
            "PYTHONPATH": paths,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "VITALS_AGENT": "off",
            "VITALS_QUIET": "1",
            "VITALS_DIR": f"{directory}/runs",
            "VITALS_SHM": directory,
            **(environ or {}),
        }
        # A file, not a pipe: a process that the part started must not keep it open.
        log = Path(directory, "stderr.txt")
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "vitals_bench.gpu.child", name, str(out)],
                cwd=directory,
                env=variables,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                # The ranks of a job stay in the session of their part, and are killed with it.
                start_new_session=environ is None,
            )
        try:
            status, why = "error", f"it ended with exit code {process.wait(limit_seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status, why = "timeout", f"it did not end within {limit_seconds:.0f} s"
        trace = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        result = {"status": status, "why": why, "trace": trace}
        if status != "timeout" and out.exists():
            result = json.loads(out.read_text())
    return result | {"seconds": round(time.monotonic() - began, 1)}


def run_ranks(name: str, *, num_ranks: int, has_own_gpus: bool) -> list[dict[str, Any]]:
    """Run a part once per rank of one job; return the results by rank."""
    environments = list(RankJob(num_ranks, has_own_gpus).environments())
    with ThreadPoolExecutor(num_ranks) as pool:
        run: Callable[[Mapping[str, str]], dict[str, Any]]
        run = lambda environ: run_part(name, None, environ)  # noqa: E731
        return list(pool.map(run, environments))


class GpuCheck:
    """All parts of a request; the JSON and the text page are written after each part.

    Raises:
        UsageError: the results to resume come from another machine or revision.
        StorageError: the result cannot be written.
    """

    def __init__(self, request: Request, show: Callable[[str], None]) -> None:
        self._request = request
        self._show = show
        self._parts = load_parts()
        self._end = time.monotonic() + request.limit_seconds
        machine = run_part(MACHINE, _MACHINE_SECONDS)
        if machine["status"] != "passed":
            raise UsageError(
                f"the machine cannot be described: {machine['why']}",
                hint="\n".join(machine.get("trace", [])) or "check the PyTorch installation",
            )
        self.result: Facts = {
            "format": 1,
            "date": date.today().isoformat(),
            "commit": request.commit or _find_commit(),
            "machine": machine["facts"],
            "parts": {
                name: {"group": part.group, "seconds": 0.0, "status": "omitted", "why": ""}
                for name, part in self._parts.items()
            },
        }
        if request.is_resumed and (request.out / RESULT_NAME).exists():
            self._resume(json.loads((request.out / RESULT_NAME).read_text()))

    def _resume(self, before: Facts) -> None:
        for key in ("commit", "machine"):
            if before[key] != self.result[key]:
                raise UsageError(
                    f"{self._request.out / RESULT_NAME} has another {key}: {before[key]}; "
                    f"now it is {self.result[key]}",
                    hint="choose another --out, or omit --resume",
                )
        self.result["parts"] |= before["parts"]

    @property
    def num_gpus(self) -> int:
        """Number of CUDA devices of this machine."""
        return len(self.result["machine"]["gpus"])

    def run(self) -> int:
        """Run the parts; return 1 if one failed or did not run, otherwise 0."""
        self._store()
        for group in self._request.groups:
            # Without a GPU the few parts that run share the whole time.
            limit = GROUP_SECONDS[group] if self.num_gpus else self._request.limit_seconds
            self._run_group(group, min(self._end, time.monotonic() + limit))
        self._show((self._request.out / TEXT_NAME).read_text())
        return int(any(has_failed(result) for result in self.result["parts"].values()))

    def _run_group(self, group: str, end: float) -> None:
        names = [name for name, part in self._parts.items() if part.group == group]
        if self._request.only:
            names = [name for name in names if name in self._request.only]
        todo = []
        for name in names:
            before = self.result["parts"][name]
            if self._parts[name].num_gpus > self.num_gpus:
                self._add(name, {"status": "skipped", "why": missing_gpus(self._parts[name])})
            elif before["status"] != "passed":
                todo.append(name)
        num_jobs = self._request.jobs or (5 if self.num_gpus else 1)
        for jobs, is_alone in ((num_jobs, False), (1, True)):
            with ThreadPoolExecutor(jobs) as pool:
                started = {
                    pool.submit(self._run_until, name, end): name
                    for name in todo
                    if self._parts[name].is_alone is is_alone
                }
                for future in as_completed(started):
                    self._add(started[future], future.result())

    def _run_until(self, name: str, end: float) -> Facts:
        """Run a part if there is time for it before ``end``."""
        seconds = end - time.monotonic()
        if seconds < _MIN_PART_SECONDS:
            return {"status": "not run", "why": "the time limit was reached; use --resume"}
        # On the CPU the usual durations do not hold.
        part_seconds = self._parts[name].limit_seconds if self.num_gpus else seconds
        return run_part(name, min(seconds, part_seconds))

    def _add(self, name: str, result: Facts) -> None:
        self.result["parts"][name] = {"group": self._parts[name].group, "seconds": 0.0, **result}
        self._show(f"{result['status']:8} {name}  {result['why']}".rstrip())
        self._store()

    def _store(self) -> None:
        out = self._request.out
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / RESULT_NAME).write_text(json.dumps(self.result, indent=1) + "\n")
            (out / TEXT_NAME).write_text(make_text(self.result))
        except OSError as error:
            raise StorageError(
                f"{out} cannot be written: {error.strerror}", hint="choose another --out"
            ) from error


def has_failed(result: Mapping[str, Any]) -> bool:
    """Whether a part's result makes the check fail. Figures to review do not."""
    return result["status"] not in ("passed", "skipped", "review", "omitted")


def missing_gpus(part: Part) -> str:
    """Return the reason why a part is skipped on a machine with too few GPUs."""
    return "needs a CUDA GPU" if part.num_gpus == 1 else f"needs {part.num_gpus} CUDA GPUs"


def _find_commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return "unknown"
    return done.stdout.strip() or "unknown"
