"""Runs mutants: each with the tests that reach its line, up to the first that fails."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import msgspec
from coverage import CoverageData

from tests.mutants.draw import FOLDERS, Mutant

USUAL = "not slow and not nightly"
PACKAGES = ("agent", "collector", "dashboard", "deploy", "plugins", "benchmarks")
TEST_SECONDS = 60
"""Limit of one test: a loop without an end counts as noticed."""


class Result(msgspec.Struct, frozen=True):
    """What came of one mutant."""

    mutant: Mutant
    outcome: str
    """``killed``, ``survived``, or ``no test`` if no test reaches the file."""
    num_tests: int
    seconds: float
    killer: str = ""


class Checkout:
    """A copy of a source tree, in which files can be changed while others read the original."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [folder, *(folder / package for package in PACKAGES)]
        self._environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @classmethod
    def of(cls, root: Path, folder: Path) -> "Checkout":
        """Copy the tracked and the new files of a git checkout."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        shutil.rmtree(folder, ignore_errors=True)
        for name in names.stdout.splitlines():
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        return cls(folder)

    def pytest(
        self, *arguments: str, seconds: float, environ: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Run pytest; a run that takes longer ends with status 1, as one with a failure does."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environ | (environ or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return 1, f"took more than {seconds} seconds"
        finally:
            # Also what its tests started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, output


@dataclass(frozen=True)
class Reach:
    """Which tests ran which lines, and how long each took."""

    lines: dict[str, dict[int, set[str]]]
    """By file: the tests that ran each line."""
    seconds: dict[str, float]

    def tests(self, mutant: Mutant, seconds: float) -> list[str]:
        """Return the tests that reach a mutant's line, the quickest first, for so many seconds.

        If none does, such as for a line that runs at import or only in a rank, these are the
        tests that reach its file.
        """
        lines = self.lines.get(mutant.path, {})
        reaching = lines.get(mutant.line) or set().union(*lines.values())
        chosen, total = [], 0.0
        for test in sorted(reaching & self.seconds.keys(), key=lambda test: self.seconds[test]):
            total += self.seconds[test]
            if chosen and total > seconds:
                break
            chosen.append(test)
        return chosen


def record(checkout: Checkout, folder: Path, arguments: Sequence[str], workers: int) -> Reach:
    """Run tests once with coverage, or read what an earlier run recorded in the folder."""
    data, outcomes = folder / "coverage", folder / "outcomes.jsonl"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = folder / "coveragerc"
        sources = "".join(f"    {checkout.folder / name}/*\n" for name in FOLDERS)
        config.write_text(f"[run]\ndata_file = {data}\ninclude =\n{sources}")
        status, output = checkout.pytest(
            *("-p", "tests.mutants.record", "-n", str(workers), "--dist", "loadfile"),
            *("--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="),
            *arguments,
            seconds=7200,
            environ={"RECORD": str(outcomes)},
        )
        (folder / "output").write_text(output)
        if status not in (0, 1) or not data.exists():
            raise SystemExit(f"the recording failed ({status}): see {folder / 'output'}")
        (folder / "done").touch()
    return read_reach(checkout.folder, data, outcomes)


def read_reach(root: Path, data: Path, outcomes: Path) -> Reach:
    """Read a recording; tests that failed without a mutant are left out."""
    rows = [msgspec.json.decode(line) for line in outcomes.read_text().splitlines()]
    seconds = {name: taken for name, passed, taken in rows if passed}
    by_file: dict[str, list[str]] = {}
    for name in seconds:
        by_file.setdefault(name.partition("::")[0], []).append(name)
    coverage = CoverageData(str(data))
    coverage.read()
    lines: dict[str, dict[int, set[str]]] = {}
    for file in coverage.measured_files():
        by_line = coverage.contexts_by_lineno(file)
        lines[Path(file).relative_to(root).as_posix()] = {
            line: set(_tests_of(contexts, by_file)) for line, contexts in by_line.items()
        }
    return Reach(lines, seconds)


def _tests_of(contexts: Iterable[str], by_file: dict[str, list[str]]) -> Iterator[str]:
    """Yield the tests of coverage's contexts, which are a test and its phase.

    A fixture is set up for one test and may serve all of the file.
    """
    for context in filter(None, contexts):
        name, _, phase = context.rpartition("|")
        yield from [name] if phase == "run" else by_file.get(name.partition("::")[0], [])


def run_all(
    mutants: Sequence[Mutant],
    checkouts: Sequence[Checkout],
    reach: Reach,
    results: Path,
    seconds: float,
) -> list[Result]:
    """Run the mutants that have no result yet, one per checkout at a time."""
    done = {result.mutant.name: result for result in read_results(results)}
    free: SimpleQueue[Checkout] = SimpleQueue()
    for checkout in checkouts:
        free.put(checkout)

    def run(mutant: Mutant) -> None:
        checkout = free.get()
        try:
            result = run_one(mutant, checkout, reach, seconds)
        finally:
            free.put(checkout)
        with results.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        print(f"{result.outcome:9} {result.seconds:5.0f} s {mutant.name}", flush=True)

    with ThreadPoolExecutor(len(checkouts)) as pool:
        list(pool.map(run, [mutant for mutant in mutants if mutant.name not in done]))
    done = {result.mutant.name: result for result in read_results(results)}
    return [done[mutant.name] for mutant in mutants]


def run_one(mutant: Mutant, checkout: Checkout, reach: Reach, seconds: float) -> Result:
    """Change the file, run the tests that reach the change, and put the file back."""
    tests = reach.tests(mutant, seconds)
    if not tests:
        return Result(mutant, "no test", 0, 0.0)
    path = checkout.folder / mutant.path
    source = path.read_text()
    began = time.monotonic()
    arguments = checkout.folder / "arguments"
    try:
        path.write_text(mutant.apply(source))
        arguments.write_text("\n".join(tests))
        # A mutant may be slower, and the machine busier, than when the tests were recorded.
        limit = 60 + 4 * seconds
        status, output = checkout.pytest(
            "-x", f"--timeout={TEST_SECONDS}", f"@{arguments}", seconds=limit
        )
    finally:
        path.write_text(source)
    killer = "".join(line for line in output.splitlines() if line.startswith(("FAILED", "ERROR")))
    taken = time.monotonic() - began
    return Result(mutant, "killed" if status else "survived", len(tests), taken, killer[:300])


def read_results(path: Path) -> list[Result]:
    """Read the results so far; none if the file does not exist."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Result) for line in lines]
