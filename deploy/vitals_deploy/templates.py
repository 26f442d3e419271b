"""Fills in the committed files of deploy/, which are the templates of `vitals deploy`.

A setting replaces its default in the file, so each file is valid as committed.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

TEMPLATES = Path(__file__).with_name("templates")
"""Links to the files; the wheel contains copies."""


def fill_template(name: str, settings: Mapping[str, str]) -> str:
    """Return a deployment file: a template with each key of ``settings`` replaced in one pass."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    missing = [default for default in settings if default not in text]
    assert not missing, f"{name} does not contain {missing}"
    return re.sub("|".join(map(re.escape, settings)), lambda match: settings[match[0]], text)


def read_dashboard() -> dict[str, Any]:
    """Read the dashboard for Grafana from its template."""
    return cast(dict[str, Any], json.loads((TEMPLATES / "vitals.json").read_bytes()))


def grafana_files() -> dict[str, str]:
    """Return the file of the dashboard that Grafana imports."""
    return {"vitals.json": (TEMPLATES / "vitals.json").read_text(encoding="utf-8")}


def alertmanager_files(
    *,
    page_url: str = "http://127.0.0.1:9095/page",
    notify_url: str = "http://127.0.0.1:9095/notify",
) -> dict[str, str]:
    """Return the configuration of Alertmanager; the URLs receive its webhook v4."""
    settings = {
        '"http://127.0.0.1:9095/page"': json.dumps(page_url),
        '"http://127.0.0.1:9095/notify"': json.dumps(notify_url),
    }
    return {"alertmanager.yml": fill_template("alertmanager.yml", settings)}


def systemd_files(*, vitals: str = "/opt/vitals/bin/vitals", port: int = 8765) -> dict[str, str]:
    """Return the systemd units of a collector and of an agent for a node's GPUs and host.

    The agent of a job is not a unit: local rank 0 starts it, because shared memory and process ids
    are private to the job.

    Args:
        vitals: absolute path of the installed command.
        port: port of the collector; the agent uses the next one. Both listen on loopback.
    """
    return {
        name: fill_template(
            name, {"/opt/vitals/bin/vitals": vitals, default: f"127.0.0.1:{port_of_unit}"}
        )
        for name, default, port_of_unit in (
            ("vitals-collector.service", "127.0.0.1:8765", port),
            ("vitals-agent.service", "127.0.0.1:8766", port + 1),
        )
    }


def slurm_files(
    *,
    nodes: int = 4,
    gpus: int = 8,
    cpus: int = 64,
    runs: str = "$HOME/vitals_runs",
    command: str = "train.py",
) -> dict[str, str]:
    """Return the Slurm batch script of a DDP or FSDP job.

    Args:
        nodes: number of nodes.
        gpus: GPUs, and ranks, of each node.
        cpus: cores of each node.
        runs: run directories, on a file system that every node sees; variables are expanded.
        command: the training script with its arguments, as torchrun takes it.
    """
    escaped = runs.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    settings = {
        "--nodes=4": f"--nodes={nodes}",
        "--gpus-per-node=8": f"--gpus-per-node={gpus}",
        "--nproc-per-node=8": f"--nproc-per-node={gpus}",
        "--cpus-per-task=64": f"--cpus-per-task={cpus}",
        '"$HOME/vitals_runs"': f'"{escaped}"',
        "dashboard $HOME/vitals_runs": f"dashboard {shlex.quote(runs) if ' ' in runs else runs}",
        "train.py &": f"{command} &",
    }
    return {"vitals-train.sbatch": fill_template("vitals-train.sbatch", settings)}
