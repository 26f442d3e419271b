"""Real trainings with one fault each, and what ``vitals repro`` says of their bad step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from trainvitals.errors import VitalsError
from trainvitals.io.capsules import find_capsules
from vitals_bench.corruption.faulty import (
    BAD_STEP,
    CHANNELS,
    FAULTS,
    LENGTH,
    ROWS,
    TRANSIENT,
    Fault,
)
from vitals_bench.rows import Grid, Row, at_least, at_most, exactly

_SECONDS = 600


class Outcome(NamedTuple):
    """Verdict on one fault."""

    name: str
    fault: Fault
    verdict: str
    module: str
    operator: str
    share: float
    """Bytes of the capsule by those of the batch."""
    is_bit_equal: bool | None
    sentence: str

    @property
    def is_module_right(self) -> bool:
        """Whether the fault's own module is named."""
        return self.module == self.fault.module

    @property
    def is_verdict_right(self) -> bool:
        """Whether the verdict is the one that follows from the fault."""
        return self.verdict == self.fault.verdict


def play(name: str) -> Outcome:
    """Train with one fault, and play its bad step by the command: each in a process of its own."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="vitals-repro-", dir="/dev/shm") as folder:
        (Path(folder) / "shm").mkdir()
        environ = {
            **os.environ,
            "VITALS_SHM": f"{folder}/shm",
            "VITALS_AGENT": "off",
            "VITALS_QUIET": "1",
            "VITALS_BENCH_FAULT": name,
            "OMP_NUM_THREADS": "1",
        }
        module = "vitals_bench.corruption.faulty"
        _run([sys.executable, "-m", module, name, folder], environ)
        capsules = [each for path in Path(folder).glob("0*") for each in find_capsules(path)]
        of_step = [each for each in capsules if each.step == BAD_STEP]
        if not of_step:
            raise VitalsError(f"{name}: steps with a capsule: {[each.step for each in capsules]}")
        command = [sys.executable, "-c", "import sys; from trainvitals.cli.main import main; "
                   "sys.exit(main())"]  # fmt: skip
        command += ["repro", str(of_step[0].path.parent.parent), str(BAD_STEP)]
        played = json.loads(
            _run([*command, "--entry", f"{module}:build", "--format", "json"], environ)
        )
        return Outcome(
            name=name,
            fault=fault,
            verdict=played["verdict"],
            module=played["module"],
            operator=f"{played['operator']} ({played['direction']})" if played["operator"] else "",
            share=of_step[0].path.stat().st_size / _batch_bytes(),
            is_bit_equal=_is_exact(played["weights"], played["is_bit_equal"]),
            sentence=played["sentence"],
        )


def _is_exact(weights: str, is_bit_equal: bool | None) -> bool | None:
    """Return whether the loss came out bit-equal; None where it could not be expected to."""
    return is_bit_equal if weights == f"the weights of step {BAD_STEP}" else None


def _batch_bytes() -> int:
    return ROWS * LENGTH * (8 + 8 + 4 + 4 * CHANNELS)


def _run(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise VitalsError(f"{' '.join(command[1:4])} failed: {done.stderr[-2000:]}")
    return done.stdout


def measure_repro(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield which module and cause are named, of faults that were really trained with."""
    names = [name for i, name in enumerate(FAULTS) if not quick or i % 6 == 0]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(play, names))
    injected = [outcome for outcome in outcomes if outcome.fault.kind != TRANSIENT]
    transient = [outcome for outcome in outcomes if outcome.fault.kind == TRANSIENT]
    count = len(injected)
    modules = sum(outcome.is_module_right for outcome in injected)
    verdicts = sum(outcome.is_verdict_right for outcome in injected)
    unit, scaled = f"of {count}", count / 24
    yield Row(name="faults whose module is named", ours=modules, unit=unit,
              goal=at_least(23 * scaled))  # fmt: skip
    yield Row(name="faults whose cause is named", ours=verdicts, unit=unit,
              goal=at_least(22 * scaled))  # fmt: skip
    if transient:
        right = sum(outcome.is_verdict_right for outcome in transient)
        yield Row(name="faults of the moment that are called hardware", ours=right,
                  unit=f"of {len(transient)}", goal=exactly(len(transient)))  # fmt: skip
    exact = [outcome.is_bit_equal for outcome in outcomes if outcome.is_bit_equal is not None]
    if exact:
        note = "of steps whose loss was finite, and whose own weights were on disk"
        yield Row(name="losses that came out bit-equal", ours=sum(exact), unit=f"of {len(exact)}",
                  goal=exactly(len(exact)), note=note)  # fmt: skip
    yield Row(
        name="the largest capsule, by its batch",
        ours=max(outcome.share for outcome in outcomes),
        unit="x",
        goal=at_most(2.0),
        note=f"a batch has {_batch_bytes():,} bytes",
    )
    yield Grid(
        title="What `vitals repro` says of a bad step",
        columns=(
            "fault",
            "kind",
            "verdict",
            "right",
            "module",
            "right ",
            "first not finite",
            "capsule",
        ),
        rows=tuple(
            (
                outcome.name,
                outcome.fault.kind,
                outcome.verdict.replace("_", " "),
                "yes" if outcome.is_verdict_right else f"no: {outcome.fault.verdict}",
                outcome.module,
                "yes" if outcome.is_module_right else f"no: {outcome.fault.module}",
                outcome.operator,
                f"{outcome.share:.2f}x",
            )
            for outcome in outcomes
        ),
        note="Each is a training of its own, with `watch()` in its loop, played in another "
        "process. Which verdict is right follows from what they mean: data where another batch "
        "is fine with the same weights and this one is bad in every precision, arithmetic where "
        "more precision cures it.",
        detail={outcome.name: outcome.sentence for outcome in outcomes},
    )
