"""A cluster on this machine: nodes of namespaces, and doubles of Slurm's commands.

Each node has its own host name, process ids, /dev/shm and /tmp; a folder is shared by all, and so
is the network. A job step ends as under proctrack/cgroup: what is left of it is killed. Root only.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.lab import Lab, until

ROOT = Path(__file__).parents[2]
SETUP = """
set -e
name=$1 shared=$2 memory=$3
hostname "$name"
mount --make-rprivate /
mount --bind "$shared/hosts" /etc/hosts
mount -t tmpfs -o "size=$memory" tmpfs /dev/shm
exec 9<"$shared"
mount -t tmpfs tmpfs /tmp
mkdir -p "$shared"
mount --no-canonicalize --bind /proc/self/fd/9 "$shared"
exec 9<&-
touch "$shared/node.$name"
exec sleep infinity
"""
SRUN = """
import json, os, signal, subprocess, sys
nodes = json.load(open({nodes!r}))
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
names = os.environ["SLURM_JOB_NODELIST"].split(",")
steps = {nodes!r} + "." + os.environ["SLURM_JOB_ID"]
with open(steps, "a+") as file:
    file.seek(0)
    step = len(file.readlines())
    file.write("step\\n")
mark = "STEP_OF_CLUSTER={{}}.{{}}".format(os.environ["SLURM_JOB_ID"], step)
tasks = []
for number, name in enumerate(names):
    own = {{"SLURM_STEP_ID": str(step), "SLURM_PROCID": str(number), "SLURMD_NODENAME": name,
           "SLURM_STEP_NUM_TASKS": str(len(names)), "TMPDIR": "/tmp"}}
    words_here = ["nsenter", "-t", str(nodes[name]), "-m", "-p", "-u", "-i", "-w" + os.getcwd(),
                  "env", mark, *words]
    tasks.append(subprocess.Popen(words_here, env={{**os.environ, **own}}))
codes = [task.wait() for task in tasks]
for path in os.listdir("/proc"):
    try:
        if path.isdigit() and mark.encode() in open(f"/proc/{{path}}/environ", "rb").read():
            os.kill(int(path), signal.SIGKILL)
    except OSError:
        pass
sys.exit(max(codes))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    os.write(1, "\\n".join(sys.argv[3].split(",")).encode() + b"\\n")
elif sys.argv[1] == "requeue":
    open({nodes!r} + ".requeued", "a").write(sys.argv[2] + "\\n")
else:
    sys.exit("scontrol: " + " ".join(sys.argv[1:]))
"""
SCANCEL = """
import os, signal, sys
assert sys.argv[1] == "--signal=TERM", sys.argv
for pid in os.listdir("/proc"):
    try:
        words = open(f"/proc/{{pid}}/cmdline", "rb").read().split(b"\\0")
        mark = f"STEP_OF_CLUSTER={{sys.argv[2]}}.".encode()
        if pid.isdigit() and b"torch.distributed.run" in words and words[0] != b"nsenter":
            if mark in open(f"/proc/{{pid}}/environ", "rb").read():
                os.kill(int(pid), signal.SIGTERM)
    except OSError:
        pass
"""


class Cluster:
    """Nodes, and the commands that a batch script finds on its path."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.programs = lab.folder / "bin"
        self.nodes: dict[str, int] = {}
        self._file = lab.folder / "nodes.json"
        self._num_restarts: dict[int, int] = {}

    def begin(self, names: Sequence[str], *, memory: str = "64m") -> None:
        """Start the nodes; their memory is gone when one is started again."""
        # An address each: torchrun takes nodes of one name and one process id for one node.
        hosts = "".join(f"127.0.1.{i} {name}\n" for i, name in enumerate(names, 1))
        (self.lab.folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        self._write_programs()
        for name in names:
            self.start_node(name, memory=memory)

    def start_node(self, name: str, *, memory: str = "64m") -> None:
        """Start one node anew."""
        sign = self.lab.folder / f"node.{name}"
        sign.unlink(missing_ok=True)
        if name in self.nodes:
            os.kill(self.nodes[name], signal.SIGKILL)
        namespaces = (
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--uts",
            "--ipc",
        )
        script = ("bash", "-c", SETUP, "node", name, str(self.lab.folder), memory)
        holder = self.lab.start(f"node-{name}", "unshare", *namespaces, *script)
        until(lambda: sign.exists() or holder.poll() is not None, f"node {name} is up")
        assert holder.poll() is None, self.lab.log(f"node-{name}").read_text()
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        self.nodes[name] = int(children[0])
        self._file.write_text(json.dumps(self.nodes))

    def on(self, name: str, *command: object, **environ: str) -> subprocess.Popen[bytes]:
        """Start a command on a node, outside of any job."""
        where = ("nsenter", "-t", str(self.nodes[name]), "-m", "-p", "-u", "-i")
        words = [str(word) for word in command]
        return self.lab.start(f"on-{name}", *where, f"-w{self.lab.folder}", *words, **environ)

    def sbatch(self, script: Path, job: int, **environ: str) -> subprocess.Popen[bytes]:
        """Start the script as a job on all nodes; the same number again is a requeue."""
        restarts = self._num_restarts[job] = self._num_restarts.get(job, -1) + 1
        Path(f"{self._file}.{job}").unlink(missing_ok=True)
        settings = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.lab.folder / "home"),
            "VITALS_SHM": "",  # as the nodes have it: /dev/shm
            "SLURM_CLUSTER_NAME": "emulated",
            "SLURM_JOB_ID": str(job),
            "SLURM_NNODES": str(len(self.nodes)),
            "SLURM_NTASKS": str(len(self.nodes)),
            "SLURM_JOB_NODELIST": ",".join(self.nodes),
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
        }
        return self.lab.start(f"job-{job}", "bash", str(script), **settings, **environ)

    def requeued(self) -> list[str]:
        """Return the jobs that asked to be queued again."""
        path = Path(f"{self._file}.requeued")
        return path.read_text().split() if path.exists() else []

    def _write_programs(self) -> None:
        self.programs.mkdir()
        nodes = str(self._file)
        python = f"#!{sys.executable}\n"
        (self.programs / "srun").write_text(python + SRUN.format(nodes=nodes))
        (self.programs / "scontrol").write_text(python + SCONTROL.format(nodes=nodes))
        (self.programs / "scancel").write_text(python + SCANCEL.format())
        run = f'#!/bin/sh\nexec "{sys.executable}" -m %s "$@"\n'
        (self.programs / "torchrun").write_text(run % "torch.distributed.run")
        (self.programs / "vitals").write_text(run % "trainvitals")
        for path in self.programs.iterdir():
            path.chmod(0o755)


def need_namespaces() -> None:
    """Skip where this user may not make namespaces, or the nodes would not see the project."""
    if any(str(path).startswith("/tmp/") for path in (ROOT, Path(sys.executable))):
        pytest.skip("the project lies in /tmp, which is private to each emulated node")
    if not all(map(shutil.which, ("unshare", "nsenter", "mount"))):
        pytest.skip("needs unshare, nsenter and mount")
    probe = ("unshare", "--mount", "--pid", "--fork", "--uts", "mount", "-t", "tmpfs", "x", "/mnt")
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("may not make namespaces and mounts: needs root")


def with_mounts(script: str, *command: object) -> list[str]:
    """Return the command line which runs ``command`` where ``script`` has mounted what it wants."""
    inside = f'set -e; mount --make-rprivate /; {script}\nexec "$@"'
    words = [str(word) for word in command]
    return ["unshare", "--mount", "--", "bash", "-c", inside, "mounts", *words]
