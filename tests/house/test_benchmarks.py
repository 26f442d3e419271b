import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs_and_every_cost_is_a_positive_number():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--format", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    costs = json.loads(done.stdout)
    measured = [c for c in costs if "adds" not in c["what"]]  # a difference may be negative
    assert len(measured) >= 6
    assert all(0 < cost["median_us"] <= cost["p95_us"] for cost in measured)
