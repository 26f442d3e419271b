"""An agent that measures itself: its parts are timed, and its process as a whole.

python -m vitals_bench.agent.served VITALS_DIR WARM_UP_SECONDS SECONDS COLLECTOR_URL
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

from trainvitals.io.client import CollectorAddress
from trainvitals.io.control_key import control_folder
from trainvitals.io.private import private_base
from vitals_agent import agent as agent_module
from vitals_agent.agent import Agent, AgentConfig
from vitals_agent.collector_endpoint import CollectorEndpoint
from vitals_agent.daemon import LoopConfig, run
from vitals_agent.gpu import GpuSampler
from vitals_agent.io_loop import IoLoop
from vitals_agent.run import ServedRun
from vitals_agent.sampling import Sampling
from vitals_bench.agent.cost import NUM_GPUS, Cost
from vitals_bench.agent.rank import NODE
from vitals_bench.agent.replayed_nvml import ReplayedNvml
from vitals_bench.processes import pss_bytes

_ALL_LINKS = (1 << 32) - 1
H100: dict[str, Any] = {
    "calls": {
        "nvmlDeviceGetUtilizationRates": {"gpu": 98, "memory": 61},
        "nvmlDeviceGetMemoryInfo_v2": {"total": 80 << 30, "reserved": 1 << 29, "used": 57 << 30},
        "nvmlDeviceGetTemperature:0": 61,
        "nvmlDeviceGetPowerUsage": 648_000,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetClockInfo:1": 1755,
        "nvmlDeviceGetClockInfo:2": 2619,
        "nvmlDeviceGetCurrentClocksEventReasons": 4,
        "nvmlDeviceGetPcieThroughput:0": 412_300,
        "nvmlDeviceGetPcieThroughput:1": 1_893_000,
    },
    "fields": {
        **dict.fromkeys(("3", "4", "94", "142", "143", "144", "145"), 0),
        "82": 70,
        "83": 912_345_678_901,
        f"138:{_ALL_LINKS}": 5_120_000_000,
        f"139:{_ALL_LINKS}": 5_120_000_000,
    },
}
"""What a GPU of that kind answers, after NVML's documentation."""


class Meter:
    """Sums the CPU time that wrapped functions use on their threads."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, measured."""

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                used = time.thread_time() - began
                self.parts[part] = self.parts.get(part, 0.0) + used

        return measured

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Measure a method or function where its callers find it."""
        setattr(owner, name, self.timed(part, getattr(owner, name)))


def main() -> None:
    """Serve, measure, print, and end at once."""
    vitals_dir, warm_up, seconds, url = sys.argv[1:]
    meter = Meter()
    meter.wrap(agent_module, "find_journals", "discovery")
    meter.wrap(ServedRun, "copy", "tailing and spooling")
    meter.wrap(ServedRun, "delete_finished_journals", "sweeping")
    meter.wrap(Sampling, "sample", "samples of node and ranks")
    meter.wrap(GpuSampler, "sample", "samples of GPUs")
    meter.wrap(Sampling, "write_gpu_samples", "writing the samples of GPUs")
    meter.wrap(IoLoop, "serve_runs", "shipping and relaying")
    gpus = [{**H100, "uuid": f"GPU-{index}"} for index in range(NUM_GPUS)]
    agent = Agent(
        AgentConfig(
            vitals_dir=Path(vitals_dir),
            base=private_base(os.environ),
            keys=control_folder(os.environ),
            node=NODE,
        ),
        client=CollectorEndpoint(lambda: CollectorAddress(url=url)) if url else None,
        nvml=ReplayedNvml({"gpus": gpus}),
    )
    report = threading.Thread(
        target=_report, args=(agent, meter, float(warm_up), float(seconds)), daemon=True
    )
    report.start()
    run(agent, LoopConfig())


def _report(agent: Agent, meter: Meter, warm_up: float, seconds: float) -> None:
    time.sleep(warm_up)
    parts, rows = dict(meter.parts), _num_rows(agent)
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    cost = Cost(
        seconds=time.monotonic() - began,
        cpu_seconds=time.process_time() - cpu,
        parts={name: used - parts.get(name, 0.0) for name, used in meter.parts.items()},
        num_rows=_num_rows(agent) - rows,
        pss_bytes=pss_bytes(os.getpid()),
    )
    sys.stdout.buffer.write(msgspec.json.encode(cost))
    sys.stdout.buffer.flush()
    os._exit(0)


def _num_rows(agent: Agent) -> int:
    return sum(tail.num_rows for run in agent.runs.values() for tail in run.tails.values())


if __name__ == "__main__":
    main()
