"""One part of the GPU check in its own process: `python -m vitals_bench.gpu.child NAME FILE`."""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from pathlib import Path

import torch

from trainvitals import __version__
from vitals_bench.gpu.parts import Facts, SkipPartError, load_parts
from vitals_bench.processes import said_by

MACHINE = "machine"
"""Name by which the facts about the machine are requested; not a part."""


def describe_machine(facts: Facts) -> None:
    """Collect everything that the results depend on."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts |= {
        "gpus": [torch.cuda.get_device_name(i) for i in range(num_gpus)],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _query_driver() if num_gpus else "",
        "python": platform.python_version(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "vitals": __version__,
    }


def _query_driver() -> str:
    try:
        text = said_by(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    except OSError:  # the container has no nvidia-smi
        return ""
    return text.partition("\n")[0].strip()


def run_here(name: str, out: Path) -> None:
    """Run one part in this process, and write its result to ``out``."""
    facts: Facts = {}
    result: Facts = {"status": "passed", "why": "", "facts": facts}
    try:
        (describe_machine if name == MACHINE else load_parts()[name].run)(facts)
        if facts.pop("needs_review", False):
            result |= {"status": "review", "why": "failures to review"}
    except SkipPartError as reason:
        result |= {"status": "skipped", "why": str(reason)}
    except Exception as error:  # noqa: BLE001 - any exception is the result of the part
        status = "failed" if isinstance(error, AssertionError) else "error"
        why = str(error) if status == "failed" else f"{type(error).__name__}: {error}"
        trace = traceback.format_exc().splitlines()[-12:]
        result |= {"status": status, "why": why, "trace": trace}
    out.write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    run_here(sys.argv[1], Path(sys.argv[2]))
