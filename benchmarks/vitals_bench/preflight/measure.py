"""Real preflights of three nodes with two ranks each, with a fault or none."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vitals_bench.preflight import rank as rank_program
from vitals_bench.preflight.nodes import Node, add_cpu_group, nodes
from vitals_bench.rows import Grid, Row, exactly
from vitals_plugins.lab.preflight.judge import PreflightFinding, judge
from vitals_plugins.lab.preflight.launch import (
    RANK_SHARE,
    Launched,
    keep_latest,
    launch,
    launcher_command,
)
from vitals_plugins.lab.preflight.report import DONE, PreflightReport

NUM_NODES, PER_NODE = 3, 2
"""Three nodes: with two, a clock or a link that differs names neither."""
NUM_FAULTS, NUM_CLEAN = 5, 50
SHARE = 0.3
"""Part of the CPU time of the other ranks that a throttled rank gets."""
SKEW_SECONDS = 1.0
BUDGET_SECONDS = 60.0
CHECKPOINT_BYTES = 32 << 20
CLEAN = "clean"
KINDS = {
    "throttled rank": "slow_rank",
    "throttled link": "slow_network",
    "slow disk": "slow_rank",
    "skewed clock": "clock_skew",
    CLEAN: "",
}
"""Faults, and the kind of the finding that names each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command."""

    results: Path | None = None
    faults: tuple[str, ...] = ()
    clean: int = NUM_CLEAN
    budget: float = BUDGET_SECONDS


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One preflight, and the findings."""

    fault: str
    number: int
    rank: int
    """Rank at fault, or on the node at fault."""
    seconds: float
    load: float
    """Processes that wanted a core in the minute before."""
    budget: float
    findings: tuple[PreflightFinding, ...]
    reports: tuple[PreflightReport, ...]

    @property
    def is_right(self) -> bool:
        """Whether the node at fault was named and no other one; of a clean run: none failed."""
        failed = [each for each in self.findings if each.severity == "fail"]
        if self.fault == CLEAN:
            return not failed
        kinds = [each.kind for each in failed if each.nodes]
        named = {node for each in failed for node in each.nodes}
        return KINDS[self.fault] in kinds and named == {f"n{self.rank // PER_NODE}"}

    @property
    def has_false(self) -> bool:
        """Whether a node was named that has no fault."""
        healthy = {each.node for each in self.reports}
        if self.fault != CLEAN:
            healthy -= {f"n{self.rank // PER_NODE}"}
        return any(healthy & {*each.nodes} for each in self.findings)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks measured everything."""
        return (
            len(self.reports)
            == NUM_NODES * PER_NODE
            == sum(each.stage == DONE for each in self.reports)
        )


def run_trial(fault: str, number: int, *, budget: float) -> Trial:
    """Run a preflight of all nodes with this fault, on another rank for each number."""
    size = NUM_NODES * PER_NODE
    faulty = random.Random(f"{fault} {number}").randrange(size)
    node = faulty // PER_NODE
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        members = stack.enter_context(
            nodes(
                NUM_NODES,
                slow_link=node if fault == "throttled link" else -1,
                slow_disk=node if fault == "slow disk" else -1,
            )
        )
        environ = {**os.environ, "VITALS_RACK": "r0", "GLOO_SOCKET_IFNAME": "eth0"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if fault == "throttled rank":
            # More ranks than cores: a healthy one has only a part of a core.
            fair = min(1.0, (os.cpu_count() or 1) / size)
            environ[rank_program.GROUP] = str(add_cpu_group(stack, SHARE * fair))
            environ[rank_program.SLOW_RANK] = str(faulty)
        start = time.monotonic()
        reports = _measure_nodes(
            members, environ, skewed=node if fault == "skewed clock" else -1, budget=budget
        )
    return Trial(
        fault=fault,
        number=number,
        rank=faulty,
        seconds=round(time.monotonic() - start, 1),
        load=load,
        budget=budget,
        findings=judge(reports),
        reports=reports,
    )


def _measure_nodes(
    members: list[Node], environ: Mapping[str, str], *, skewed: int, budget: float
) -> tuple[PreflightReport, ...]:
    """Start the launcher of each node, as Slurm does; return the reports of all ranks."""

    def measure(index: int) -> Launched:
        member = members[index]
        settings = {
            "seconds": RANK_SHARE * budget,
            "directory": str(member.directory),
            "checkpoint_bytes": CHECKPOINT_BYTES,
        }
        words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(members)}",
                 f"--node-rank={index}", f"--nproc-per-node={PER_NODE}",
                 f"--master-addr={members[0].address}", "--master-port=29500",
                 f"--local-addr={member.address}"]  # fmt: skip
        raw_settings = msgspec.json.encode(settings).decode()
        line = launcher_command(words, raw_settings, "vitals_bench.preflight.rank")
        skew = str(SKEW_SECONDS if index == skewed else 0.0)
        of_node = {**environ, "VITALS_NODE": member.name, rank_program.SKEW: skew}
        return launch(member.command(line), of_node, seconds=budget)

    reports: dict[int, PreflightReport] = {}
    with ThreadPoolExecutor(len(members)) as pool:
        for launched in pool.map(measure, range(len(members))):
            if launched.exit_code:
                sys.stderr.write("\n".join(launched.tail) + "\n")
            for report in launched.reports:
                keep_latest(reports, report)
    return tuple(reports[rank] for rank in sorted(reports))


def measure_preflight(*, quick: bool, options: Options | None = None) -> Iterator[Row | Grid]:
    """Yield how often each fault is named, and how often a clean preflight fails."""
    options = options or Options()
    trials = _read(options.results)
    for fault in KINDS:
        if options.faults and fault not in options.faults:
            continue
        num = (1 if quick else options.clean) if fault == CLEAN else 1 if quick else NUM_FAULTS
        for number in range(num):
            if (fault, number) in trials:
                continue
            trial = run_trial(fault, number, budget=options.budget)
            trials[fault, number] = trial
            _show(trial)
            if options.results is not None:
                with options.results.open("ab") as file:
                    file.write(msgspec.json.encode(trial) + b"\n")
    yield from _rows(list(trials.values()))


def _read(results: Path | None) -> dict[tuple[str, int], Trial]:
    """Return the stored preflights, judged by the current rules."""
    if results is None or not results.exists():
        return {}
    lines = results.read_bytes().splitlines()
    stored = [msgspec.json.decode(line, type=Trial) for line in lines]
    trials = [msgspec.structs.replace(each, findings=judge(each.reports)) for each in stored]
    return {(trial.fault, trial.number): trial for trial in trials}


def _show(trial: Trial) -> None:
    state = "right" if trial.is_right else "WRONG"
    where = "" if trial.fault == CLEAN else f" of rank {trial.rank}"
    sys.stderr.write(f"{trial.fault}{where}: {state}, {trial.seconds} s, load {trial.load:.1f}\n")
    for finding in trial.findings:
        sys.stderr.write(f"  {finding.severity}  {finding.text}\n")


def _rows(trials: list[Trial]) -> Iterator[Row | Grid]:
    lines = []
    for fault in KINDS:
        of_fault = [trial for trial in trials if trial.fault == fault]
        if of_fault:
            lines.append((
                fault,
                len(of_fault),
                sum(trial.is_right for trial in of_fault),
                sum(trial.has_false for trial in of_fault),
                sum(not trial.is_complete for trial in of_fault),
                sum(trial.seconds for trial in of_fault) / len(of_fault),
            ))  # fmt: skip
    yield Grid(
        title="Preflight: faults named, and healthy nodes",
        columns=("fault", "runs", "right", "healthy node named", "incomplete", "seconds"),
        rows=tuple(lines),
        note=f"{NUM_NODES} nodes of {PER_NODE} ranks in one rack, as network name spaces. Right: "
        "only the node at fault is named; in a clean run, nothing fails. Throttled rank: a control "
        f"group gives it {SHARE:.0%} of the CPU of the others. Throttled link: 100 Mbit/s instead "
        "of 1 Gbit/s. Slow disk: 10 MiB/s instead of 100. Skewed clock: 1 s, added where the rank "
        "reads it. Without history of the nodes; loaders are not compared on nodes of two cores.",
    )
    faults = [trial for trial in trials if trial.fault != CLEAN]
    clean = [trial for trial in trials if trial.fault == CLEAN]
    if faults:
        yield Row(
            name="faults named",
            ours=sum(trial.is_right for trial in faults) / len(faults),
            unit="",
            goal=exactly(1.0),
            note=f"{len(faults)} preflights",
        )
    if clean:
        yield Row(
            name="clean preflights that failed",
            ours=float(sum(not trial.is_right for trial in clean)),
            unit="",
            goal=exactly(0.0),
            note=f"{len(clean)} preflights",
        )
