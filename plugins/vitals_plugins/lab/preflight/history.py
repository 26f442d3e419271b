"""Earlier checks of each node: one JSON file per node in ``preflight/`` of the Vitals directory.

Two jobs that check a node at the same time may lose the entry of one of them; nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from trainvitals.errors import UNREADABLE, VitalsError
from trainvitals.identity import safe_node_id
from trainvitals.io.private import ensure_own_dir, read_own, replace_file
from vitals_plugins.lab.preflight.judge import Baseline, PreflightFinding
from vitals_plugins.lab.preflight.report import FIGURES, PreflightReport

MAX_CHECKS = 64
"""Checks stored per node; older ones are dropped."""
LAST_CHECKS = 5
FAILED_CHECKS = 2
"""A node fails repeatedly if this many of its ``LAST_CHECKS`` checks found a fault there."""


class NodeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check for one node."""

    check_id: str
    time_unix_ns: int
    device: str
    figures: dict[str, float]
    """Median over the ranks of the node."""
    kinds: tuple[str, ...] = ()
    """Faults that were attributed to this node."""


class FailingNode(msgspec.Struct, frozen=True, kw_only=True):
    """Node with faults in several of its latest checks."""

    node: str
    num_failed: int
    num_checks: int
    kinds: tuple[str, ...]
    last_unix_ns: int


class NodeHistory:
    """History of all nodes in one Vitals directory."""

    def __init__(self, vitals_dir: Path) -> None:
        self._directory = vitals_dir / "preflight"
        self.problems: list[str] = []
        """Files that could not be read or written."""

    def read(self, node: str) -> list[NodeCheck]:
        """Return the checks of a node, oldest first. A damaged file is renamed and reported."""
        path = self._path(node)
        try:
            return msgspec.json.decode(read_own(path), type=list[NodeCheck])
        except FileNotFoundError:
            return []
        except (*UNREADABLE, VitalsError, OSError) as error:
            self.problems.append(f"{path}: {error}; stored as {self._quarantine(path)}")
            return []

    def add(self, node: str, check: NodeCheck) -> None:
        """Append a check, unless another process of the same preflight stored it already."""
        checks = self.read(node)
        if any(each.check_id == check.check_id for each in checks):
            return
        raw = msgspec.json.encode([*checks, check][-MAX_CHECKS:])
        try:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            ensure_own_dir(self._directory)
            replace_file(self._path(node), raw)
        except (VitalsError, OSError) as error:  # the result counts without its history
            self.problems.append(f"{self._path(node)}: {error}")

    def nodes(self) -> list[str]:
        """Return the nodes with a history."""
        names = sorted(path.stem for path in self._directory.glob("*.json"))
        return [name for name in names if safe_node_id(name) == name]

    def _path(self, node: str) -> Path:
        return self._directory / f"{safe_node_id(node)}.json"

    def _quarantine(self, path: Path) -> str:
        """Rename a damaged file, replacing an earlier damaged one: at most one per node."""
        damaged = path.with_suffix(".damaged")
        try:
            path.rename(damaged)
        except OSError as error:  # reported together with the damage
            return f"{path.name}, because it cannot be renamed: {error.strerror}"
        return damaged.name


def baseline(checks: Sequence[NodeCheck], device: str) -> Baseline:
    """Return the figures of the checks without a fault: others would lower the reference."""
    clean = [each.figures for each in checks if not each.kinds and each.device == device]
    return Baseline(device, tuple(clean))


def node_checks(
    reports: Sequence[PreflightReport],
    findings: Iterable[PreflightFinding],
    *,
    check_id: str,
    now_unix_ns: int,
) -> dict[str, NodeCheck]:
    """Return what to store for each node."""
    by_node: dict[str, list[PreflightReport]] = {}
    for report in reports:
        by_node.setdefault(report.node, []).append(report)
    failed = [each for each in findings if each.severity == "fail"]
    return {
        node: NodeCheck(
            check_id=check_id,
            time_unix_ns=now_unix_ns,
            device=of_node[0].device,
            figures=_medians(of_node),
            kinds=tuple(dict.fromkeys(each.kind for each in failed if node in each.nodes)),
        )
        for node, of_node in by_node.items()
    }


def _medians(reports: Sequence[PreflightReport]) -> dict[str, float]:
    values = {
        spec.name: [each.figures[spec.name] for each in reports if spec.name in each.figures]
        for spec in FIGURES
    }
    return {name: median(numbers) for name, numbers in values.items() if numbers}


def failing_nodes(checks_by_node: Mapping[str, Sequence[NodeCheck]]) -> tuple[FailingNode, ...]:
    """Return the nodes that fail repeatedly."""
    failing = []
    for node, checks in sorted(checks_by_node.items()):
        latest = checks[-LAST_CHECKS:]
        failed = [each for each in latest if each.kinds]
        if len(failed) >= FAILED_CHECKS:
            kinds = dict.fromkeys(kind for each in failed for kind in each.kinds)
            failing.append(
                FailingNode(
                    node=node,
                    num_failed=len(failed),
                    num_checks=len(latest),
                    kinds=tuple(kinds),
                    last_unix_ns=failed[-1].time_unix_ns,
                )
            )
    return tuple(failing)


def exclude_list(nodes: Iterable[FailingNode]) -> str:
    """Return the nodes as ``sbatch --exclude`` takes them."""
    return ",".join(each.node for each in nodes)


def node_affinity(nodes: Iterable[FailingNode]) -> str:
    """Return YAML for ``spec.affinity`` of a pod; empty without nodes (``NotIn`` needs values)."""
    names = [each.node for each in nodes]
    if not names:
        return ""
    return "\n".join(
        [
            "nodeAffinity:",
            "  requiredDuringSchedulingIgnoredDuringExecution:",
            "    nodeSelectorTerms:",
            "      - matchExpressions:",
            "          - key: kubernetes.io/hostname",
            "            operator: NotIn",
            "            values:",
            *(f'              - "{name}"' for name in names),
        ]
    )
