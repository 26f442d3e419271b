"""One rank of a framework's trainings: ``torchrun -m tests.integrations.rank NAME FOLDER``."""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integrations.script import SETTINGS, Script


def main(name: str, folder: Path) -> None:
    """Play the script in every variant of the framework, one after another."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    results = {}
    for variant, train in importlib.import_module(name).VARIANTS.items():
        here = folder / variant.replace(" ", "-")
        (here / "shm").mkdir(parents=True, exist_ok=True)
        os.environ |= {
            "VITALS_DIR": str(here / "runs"),
            "VITALS_SHM": str(here / "shm"),
            "VITALS_AGENT": "off",
            **SETTINGS,
        }
        script = Script(here)
        try:
            train(script)
            results[variant] = script.result()
        except Exception as error:
            error.add_note(f"in {variant!r} on rank {rank}, at step {script.step}")
            raise
    (folder / f"{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # gloo aborts a process at its exit now and then; what was found is written


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
