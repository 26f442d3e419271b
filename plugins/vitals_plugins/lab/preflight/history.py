"""Earlier checks of each node: one JSON file per node in ``preflight/`` of the Vitals directory.

Two jobs that check a node at the same time may lose the entry of one of them; nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from trainvitals.errors import UNREADABLE, UsageError, VitalsError
from trainvitals.identity import safe_node_id
from trainvitals.io.private import ensure_own_dir, read_own, replace_file
from trainvitals.views import FailingNode
from vitals_plugins.lab.preflight.judge import Baseline, PreflightFinding
from vitals_plugins.lab.preflight.report import FIGURES, PreflightReport

MAX_CHECKS = 64
"""Checks stored per node; older ones are dropped."""
LAST_CHECKS = 5
LOCAL = "local"
"""Start of the settings of checks without a launcher."""
FAILED_CHECKS = 2
"""A node fails repeatedly if this many of its ``LAST_CHECKS`` checks found a fault there."""


class NodeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check for one node."""

    node: str = ""
    check_id: str
    time_unix_ns: int
    device: str
    num_ranks: int = 0
    num_gpus: int = 0
    """Ranks with a GPU."""
    settings: str = ""
    """Everything else that must be equal for a comparison."""
    figures: dict[str, float]
    """Median over the ranks of the node."""
    kinds: tuple[str, ...] = ()
    """Faults that were attributed to this node."""


class NodeHistory:
    """History of all nodes in one Vitals directory, which belongs to one user."""

    def __init__(self, vitals_dir: Path) -> None:
        self._directory = vitals_dir / "preflight"
        self.problems: list[str] = []
        """Files that could not be read or written."""

    def read(self, node: str) -> list[NodeCheck] | None:
        """Return a node's preflights, oldest first; None if its file cannot be read now.

        A file with damaged content is renamed, and the history starts again. Another one, such as
        a file of another user, stays as it is.
        """
        return self._read(self._path(node), is_renamed=True)

    def read_all(self) -> dict[str, list[NodeCheck]]:
        """Return the earlier preflights of all nodes; changes no file.

        Raises:
            UsageError: the Vitals directory does not exist.
        """
        try:
            if not self._directory.parent.is_dir():
                raise UsageError(
                    f"{self._directory.parent} is not a directory", hint="set --dir or VITALS_DIR"
                )
            paths = sorted(self._directory.iterdir())
        except FileNotFoundError:  # no check was stored yet
            return {}
        except OSError as error:
            self._report(self._directory, error)
            return {}
        histories = {}
        for path in paths:
            checks = self._read(path) if path.suffix == ".json" and path.name[0] != "." else None
            if checks:
                histories[checks[-1].node or path.stem] = checks
        return histories

    def add(self, node: str, check: NodeCheck) -> None:
        """Append a check, unless another process of the same preflight stored it already."""
        checks = self.read(node)
        if checks is None or any(each.check_id == check.check_id for each in checks):
            return
        raw = msgspec.json.encode([*checks, check][-MAX_CHECKS:])
        try:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            ensure_own_dir(self._directory)
            replace_file(self._path(node), raw)
        except (VitalsError, OSError) as error:  # the result counts without its history
            self._report(self._path(node), error)

    def _path(self, node: str) -> Path:
        """Return the file of a node's earlier preflights."""
        name = safe_node_id(node)
        if name != node:  # two nodes must not share a file
            name = f"{name[:47]}-{hashlib.sha256(node.encode()).hexdigest()[:16]}"
        return self._directory / f"{name}.json"

    def _read(self, path: Path, *, is_renamed: bool = False) -> list[NodeCheck] | None:
        """Read a file of earlier preflights; None if it cannot be read, and report why."""
        try:
            return msgspec.json.decode(read_own(path), type=list[NodeCheck])
        except FileNotFoundError:
            return []
        except UNREADABLE as error:
            self._report(path, error)
            return self._rename_damaged(path) if is_renamed else None
        except (VitalsError, OSError) as error:
            self._report(path, error)
            return None

    def _rename_damaged(self, path: Path) -> list[NodeCheck] | None:
        """Rename a node's damaged history, replacing an earlier one: at most one per node."""
        try:
            path.rename(path.with_suffix(".damaged"))
        except OSError as error:
            self._report(path, error)
            return None
        return []

    def _report(self, path: Path, error: Exception) -> None:
        """Add a problem with a node's history, once."""
        text = error.text if isinstance(error, VitalsError) else str(error)
        problem = text if str(path) in text else f"{path}: {text}"
        if problem not in self.problems:
            self.problems.append(problem)


def baseline(checks: Sequence[NodeCheck], current: NodeCheck) -> Baseline:
    """Return a node's preflights without a fault: others would lower the reference."""
    clean = [each for each in checks if not each.kinds and each.settings == current.settings]
    figures = [
        each.figures
        for each in clean
        if (each.device, each.num_ranks) == (current.device, current.num_ranks)
    ]
    is_local = current.settings.startswith(LOCAL)  # a rank per GPU
    num_gpus = [each.num_gpus for each in clean if each.num_gpus] if is_local else []
    return Baseline(current.device, tuple(figures), num_gpus[-1] if num_gpus else 0)


def node_checks(
    reports: Sequence[PreflightReport],
    findings: Iterable[PreflightFinding],
    *,
    check_id: str,
    now_unix_ns: int,
    settings: str = "",
) -> dict[str, NodeCheck]:
    """Return the results of a preflight to store for each node."""
    by_node: dict[str, list[PreflightReport]] = {}
    for report in reports:
        by_node.setdefault(report.node, []).append(report)
    # An image with another version is not a fault of the node.
    failed = [
        each for each in findings if each.severity == "fail" and each.kind != "different_versions"
    ]
    is_complete = len(reports) == max((each.world_size for each in reports), default=0)
    return {
        node: NodeCheck(
            node=node,
            check_id=check_id,
            time_unix_ns=now_unix_ns,
            device=of_node[0].device,
            num_ranks=len(of_node),
            num_gpus=sum(each.is_gpu for each in of_node) if is_complete else 0,
            settings=f"{settings}, torch {of_node[0].versions.get('torch', '')}",
            figures=_medians(of_node),
            kinds=tuple(dict.fromkeys(each.kind for each in failed if node in each.nodes)),
        )
        for node, of_node in by_node.items()
    }


def _medians(reports: Sequence[PreflightReport]) -> dict[str, float]:
    """Return each measurement's median over a node's ranks in a preflight."""
    values = {
        spec.name: [each.figures[spec.name] for each in reports if spec.name in each.figures]
        for spec in FIGURES
    }
    return {name: median(numbers) for name, numbers in values.items() if numbers}


def failing_nodes(checks_by_node: Mapping[str, Sequence[NodeCheck]]) -> tuple[FailingNode, ...]:
    """Return the nodes that fail their latest preflights repeatedly."""
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


def failing_nodes_in(folders: Iterable[Path]) -> tuple[FailingNode, ...]:
    """Return the nodes that fail their latest preflights repeatedly, for the dashboard.

    Called by the collector: missing directories and unreadable files have no nodes.
    """
    checks: dict[str, list[NodeCheck]] = {}
    for folder in folders:
        if folder.is_dir():
            checks |= NodeHistory(folder).read_all()
    return failing_nodes(checks)


def exclude_list(nodes: Iterable[FailingNode]) -> str:
    """Return nodes that failed preflights as ``sbatch --exclude`` takes them."""
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
            "      - matchFields:",
            # One value each: a field is compared with one name.
            *(
                f"          - {{key: metadata.name, operator: NotIn, values: [{json.dumps(name)}]}}"
                for name in names
            ),
        ]
    )
