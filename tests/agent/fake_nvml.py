"""Stand-ins for the ``pynvml`` module: recordings, and as many GPUs as a test wants."""

import json
from pathlib import Path

from vitals_bench.agent.replayed_nvml import ReplayedNvml

RECORDINGS = Path(__file__).parent / "nvml"
LIBRARY_NOT_FOUND, GPU_IS_LOST = 12, 15
LOST = {"calls": {"*": {"error": GPU_IS_LOST}}}
BACK = {"calls": {"*": None}}


def recorded(name: str) -> ReplayedNvml:
    return ReplayedNvml.read(RECORDINGS / f"{name}.json")


def gpus(*uuids: str) -> ReplayedNvml:
    """H100s of these names."""
    one = json.loads((RECORDINGS / "h100_x8.json").read_text())["gpus"][0]
    return ReplayedNvml({"gpus": [{**one, "uuid": uuid} for uuid in uuids]})


def no_driver() -> ReplayedNvml:
    return ReplayedNvml({"init": {"error": LIBRARY_NOT_FOUND}, "gpus": []})
