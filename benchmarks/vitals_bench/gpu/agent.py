"""The agent next to a training on a GPU: its samples, its CUDA contexts, and a hung kernel."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from trainvitals.detect.hang import HangConfig
from trainvitals.io.spool_files import read_batches
from trainvitals.rows import Value
from trainvitals.wire import decode_batch
from vitals_bench.gpu.loops import DEVICE, HAS_CUDA
from vitals_bench.gpu.parts import Facts, SkipPartError, part
from vitals_bench.gpu.speed import Size, UpdateLoop

TRAINING_SECONDS = 12.0
HANG_SECONDS = 20.0
MAX_DEVIATION = 0.25
"""Largest relative difference of power and clocks, which change between two readings."""
HUNG_REASONS = ("device", "computing")
_QUERY = ("uuid", "memory.total", "power.draw", "clocks.sm", "clocks.mem")


class Reading(NamedTuple):
    """Values of one GPU at one time, in base units."""

    uuid: str
    memory_total_bytes: float
    power_watts: float
    sm_clock_hertz: float
    memory_clock_hertz: float


def parse_readings(text: str) -> Iterator[Reading]:
    """Yield the GPUs in the CSV of ``nvidia-smi``; values it does not have are NaN."""
    for line in text.strip().splitlines():
        uuid, *words = (word.strip() for word in line.split(","))
        mib, watts, sm, memory = (_number(word) for word in words)
        yield Reading(uuid, mib * 2**20, watts, sm * 1e6, memory * 1e6)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:  # such as [N/A]
        return float("nan")


def compare_samples(
    rows: Mapping[str, Sequence[Mapping[str, Value]]], readings: Sequence[Reading]
) -> Iterator[str]:
    """Yield the differences between the agent's rows and ``nvidia-smi``.

    Args:
        rows: the agent's rows of each GPU by its UUID.
        readings: those of ``nvidia-smi`` in the same time.
    """
    by_uuid: dict[str, list[Reading]] = {}
    for reading in readings:
        by_uuid.setdefault(reading.uuid, []).append(reading)
    # Results are published, so they contain no UUIDs.
    if missing := by_uuid.keys() - rows.keys():
        yield f"the agent has no rows of {len(missing)} GPUs that nvidia-smi lists"
    if unknown := rows.keys() - by_uuid.keys():
        yield f"the agent has rows of {len(unknown)} GPUs that nvidia-smi does not list"
    for uuid in by_uuid.keys() & rows.keys():
        for column in Reading._fields[1:]:
            expected = statistics.median(getattr(each, column) for each in by_uuid[uuid])
            values = [v for row in rows[uuid] if isinstance(v := row.get(column), float | int)]
            if expected != expected:  # NaN: nvidia-smi does not have it
                continue
            actual = statistics.median(values) if values else None
            # nvidia-smi rounds to MiB.
            limit = 2**20 if column == "memory_total_bytes" else MAX_DEVIATION * expected
            if actual is None or abs(actual - expected) > limit:
                yield f"{column}: the agent has {actual}, nvidia-smi {expected}"


def read_gpu_rows(runs: Path) -> dict[str, list[Mapping[str, Value]]]:
    """Return the rows of each GPU that agents stored below ``runs``."""
    rows: dict[str, list[Mapping[str, Value]]] = {}
    for spool in runs.glob("*/agents/*/spool"):
        for _, raw in read_batches(spool):
            batch = decode_batch(raw)
            header = batch.header
            if header.stream == "gpu":
                schema, uuid = header.stream_schema, header.identity.source.partition(":")[2]
                starts = range(0, len(batch.rows), schema.row_size)
                unpacked = (schema.unpack(batch.rows[i : i + schema.row_size]) for i in starts)
                rows.setdefault(uuid, []).extend(unpacked)
    return rows


def find_agents(runs: Path) -> list[psutil.Process]:
    """Return the agents of the runs below ``runs``."""
    agents = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "vitals_agent" in arguments and str(runs) in arguments:
            agents.append(process)
    return agents


def _read_smi() -> list[Reading]:
    return list(parse_readings(_query_smi(f"--query-gpu={','.join(_QUERY)}")))


def _read_pids_with_context() -> set[int]:
    """Return the processes that compute on a GPU, as ``nvidia-smi`` sees them."""
    words = _query_smi("--query-compute-apps=pid").split()
    return {int(word) for word in words if word.isdecimal()}


def _query_smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
    except FileNotFoundError as error:
        raise SkipPartError("nvidia-smi is not installed") from error
    return done.stdout


@part("agent", 25, num_gpus=1)
def nvml_rows_match_nvidia_smi(facts: Facts) -> None:
    """The agent's samples are equal to ``nvidia-smi``, and it has no CUDA context."""
    _read_smi()  # without it the part is skipped
    readings: list[Reading] = []
    runs = Path(os.environ["VITALS_DIR"])
    os.environ.pop("VITALS_AGENT", None)
    loop = UpdateLoop(Size("a loaded GPU", 4096, 8), is_guarded=True)
    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    start = time.monotonic()
    next_reading = start + 3.0
    while (now := time.monotonic()) < start + TRAINING_SECONDS:
        for _ in range(8):
            torch.mm(matrix, matrix)
        loop.step()
        if now >= next_reading:
            readings += _read_smi()
            next_reading = now + 2.0
    agents = find_agents(runs)
    assert agents, "no agent was started"
    # In a container, nvidia-smi may see other numbers of processes, or none.
    pids = _read_pids_with_context()
    facts["sees_contexts"] = os.getpid() in pids
    facts["contexts"] = sum(process.pid in pids for process in agents)
    times = [process.cpu_times() for process in agents]
    facts["agent_cpu_seconds"] = sum(each.user + each.system for each in times)
    loop.close()
    rows = read_gpu_rows(runs)
    facts["num_samples"] = {f"GPU {i}": len(each) for i, each in enumerate(rows.values())}
    facts["readings"] = [list(reading[1:]) for reading in readings]
    differences = list(compare_samples(rows, readings))
    assert not differences, "; ".join(differences)
    assert facts["contexts"] == 0, "the agent has a CUDA context"


@part("agent", 40, num_gpus=2, is_alone=True)
def spinning_kernel_is_named(facts: Facts) -> None:
    """A kernel that does not end on one of two NCCL ranks is shown as a hang of that rank.

    Two ranks on one GPU could only use gloo, which does not say what a GPU has begun.
    """
    from vitals_bench.hang.measure import Fault, run_trial

    fault = Fault(
        title="a kernel that does not end",
        name="kernel",
        place="collective",
        seconds=HANG_SECONDS + 10.0,
        config=HangConfig(computing_seconds=10.0),
        training="nccl",
    )
    trial = run_trial(fault, ranks=2, watch_seconds=HANG_SECONDS)
    facts |= {
        "shown_seconds": trial.shown,
        "paged_seconds": trial.paged,
        "ranks": sorted(trial.culprits),
        "reasons": trial.reasons,
        "texts": trial.texts,
    }
    assert trial.culprits == {fault.rank}, f"the verdict names {facts['ranks']}: {trial.texts}"
    assert set(trial.reasons) & set(HUNG_REASONS), f"{trial.reasons}: {trial.texts}"


@part("agent", 15, is_alone=True)
def burn_in_finds_no_error(facts: Facts) -> None:
    """The burn-in of `vitals doctor` computes the known answers."""
    seconds = "8" if HAS_CUDA else "1"
    command = [sys.executable, "-m", "trainvitals", "doctor", "--burn-in", seconds]
    done = subprocess.run(
        [*command, "--format", "json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    facts["checks"] = [check["text"] for check in json.loads(done.stdout)]
