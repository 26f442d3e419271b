"""Tests of the checkout on a GPU: those marked ``gpu``, and the hook suite on CUDA tensors."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from vitals_bench.gpu.parts import Facts, SkipPartError, part

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "trainer_hooks"
_MAX_NAMES = 200


class JunitCounts(NamedTuple):
    """Tests in a JUnit report."""

    num_passed: int
    num_skipped: int
    failed: tuple[str, ...]
    """Each with the first line of its message."""


def parse_junit(text: str) -> JunitCounts:
    """Return the counts of a JUnit report."""
    num_passed = num_skipped = 0
    failed: list[str] = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error")]
        if problems:
            message = (problems[0].get("message") or "").partition("\n")[0][:160]
            failed.append(f"{case.get('classname')}::{case.get('name')}: {message}")
        elif case.find("skipped") is not None:
            num_skipped += 1
        else:
            num_passed += 1
    return JunitCounts(num_passed, num_skipped, tuple(failed))


def _run_pytest(facts: Facts, arguments: list[str], seconds: float) -> JunitCounts:
    """Run pytest in the checkout; a run that is cut off leaves no report, and fails."""
    if not TESTS.is_dir():
        raise SkipPartError("the tests are not in this installation; use a checkout")
    report = Path("junit.xml").absolute()
    variables = {k: v for k, v in os.environ.items() if not k.startswith("VITALS_")}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments, f"--junitxml={report}"],
        cwd=ROOT,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert report.exists(), f"pytest exit code {done.returncode}: {done.stdout[-2000:]}"
    counts = parse_junit(report.read_text())
    facts |= {
        "passed": counts.num_passed,
        "skipped": counts.num_skipped,
        "failed": counts.failed[:_MAX_NAMES],
        "num_failed": len(counts.failed),
    }
    return counts


@part("tests", 25, num_gpus=1)
def gpu_tests(facts: Facts) -> None:
    """The tests with the mark ``gpu`` pass."""
    names = ("test_gpu.py", "measures/test_gpu.py", "test_verdict_graph.py", "test_ema.py")
    counts = _run_pytest(facts, ["-m", "gpu", *(str(TESTS / name) for name in names)], 100.0)
    assert not counts.failed, counts.failed
    assert counts.num_passed, "no test ran"


@part("suite", 120, num_gpus=1, is_alone=True)
def hook_suite_on_cuda(facts: Facts) -> None:
    """The hook suite with CUDA as the default device. Each failure needs a review.

    Some tests use a CPU generator or compare with CPU tensors: they fail although Vitals is right.
    So failures do not fail the check; they are listed.
    """
    workers = str(min(12, len(os.sched_getaffinity(0))))
    marks = "not slow and not dist and not servers and not browser"
    arguments = ["-n", workers, "--timeout", "40", "-m", marks]
    counts = _run_pytest(
        facts, [*arguments, "-p", "vitals_bench.gpu.cuda_default", str(TESTS)], 135.0
    )
    assert counts.num_passed, "no test passed"
    facts["needs_review"] = bool(counts.failed)
