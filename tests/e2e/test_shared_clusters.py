"""What a shared machine and a batch system do to a training: others' folders, other memory.

What no continuous integration has is emulated: containers by namespaces and mounts, other users by
folders that belong to them, a cluster by ``tests.e2e.cluster``.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT, Cluster, need_namespaces, with_mounts
from tests.e2e.lab import Lab, free_port, open_lab, until
from trainvitals.identity import Identity, new_run_id
from trainvitals.io.journal import JournalReader, announce_run
from trainvitals.io.mailbox import Mailbox
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import read_batches
from trainvitals.records import Note, decode_events
from trainvitals.wire import decode_batch
from vitals_agent.state_dir import AgentStateDir
from vitals_deploy.templates import slurm_files

pytestmark = pytest.mark.dist

STEPS = 40
PROGRAM = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import trainer_hooks
if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
stop = os.environ.get("STOP")
with trainer_hooks.watch(model, optimizer, run=sys.argv[1], mode="guard") as monitor:
    while monitor.step_index < 40 or (stop and not Path(stop).exists()):
        model(torch.ones(2, 4)).square().mean().backward()
        monitor.step()
print("trained", monitor.run_id, dict(monitor.swallowed_errors), flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.fixture
def lab(tmp_path):
    with open_lab(tmp_path) as opened:
        yield opened


def environ(lab: Lab, **more: str) -> dict[str, str]:
    """Return an environment in which nobody has said where journals are to lie."""
    found = lab.environ(PYTHONPATH=str(ROOT), **more)
    del found["VITALS_SHM"]
    return found


def train_in(lab: Lab, mounts: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Train for some steps where ``mounts`` were made."""
    need_namespaces()
    return subprocess.run(
        with_mounts(mounts, sys.executable, "-c", PROGRAM, "job"),
        env=environ(lab, **more),
        cwd=lab.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def spooled(run_dir: Path) -> dict[str, list[tuple[Identity, str, int, int]]]:
    """Return (writer, stream, first number, number of rows) of each batch, by node."""
    found: dict[str, list[tuple[Identity, str, int, int]]] = {}
    for path in sorted(run_dir.glob("agents/*/spool")):
        headers = [decode_batch(raw).header for _, raw in read_batches(path)]
        found[path.parent.name] = [(h.identity, h.stream, h.first_seq, h.num_rows) for h in headers]
    return found


def num_steps(run_dir: Path) -> Counter[str]:
    """Return how many rows of steps each writer has in the spools, and that none is there twice."""
    rows: Counter[tuple[str, int]] = Counter()
    for batches in spooled(run_dir).values():
        for who, stream, first, num_rows in batches:
            if stream == "steps":
                rows.update((f"{who.source} {who.incarnation}", first + i) for i in range(num_rows))
    assert set(rows.values()) <= {1}
    return Counter(writer for writer, _ in rows)


def notes(run_dir: Path) -> list[Note]:
    """Return what agents and ranks noted."""
    found = []
    for path in sorted(run_dir.glob("agents/*/spool")):
        for _, raw in read_batches(path):
            batch = decode_batch(raw)
            if batch.header.stream == "events":
                rows = decode_events(batch.header.stream_schema, batch.rows)
                found += [row.event for row in rows if isinstance(row.event, Note)]
    return found


def run_dirs(lab: Lab) -> list[Path]:
    return sorted(path.parent for path in lab.runs.glob("[0-9A-Z]*/run.json"))


@pytest.mark.slow
def test_two_jobs_of_one_user_on_one_node_have_each_their_own_agent_and_journals(lab):
    stop = lab.folder / "stop"
    jobs = [
        lab.start(name, sys.executable, "-c", PROGRAM, name, STOP=str(stop), SLURM_JOB_ID=job)
        for name, job in (("one", "7"), ("two", "8"))
    ]
    until(lambda: len(list(lab.runs.glob("*/agents/*/agent.json"))) == 2, "each has its agent")
    agents = [words for words in lab.alive().values() if "vitals_agent" in words]
    stop.touch()
    assert [0, 0] == [job.wait(60) for job in jobs]
    until(lambda: not lab.alive(), "the agents drain and end")
    ids = {re.search(r"trained (\w{26})", lab.log(name).read_text())[1] for name in ("one", "two")}
    assert ids == {path.name for path in run_dirs(lab)}
    assert sorted(ids) == sorted(words.split("--run ")[1].split()[0] for words in agents)
    for path in run_dirs(lab):
        assert {path.name} == {
            who.run_id for batches in spooled(path).values() for who, *_ in batches
        }
        (rows,) = num_steps(path).values()
        assert rows >= STEPS
    assert [] == [path for path in lab.shared.glob("*/*/*") if path.is_dir()]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_node_reads_and_steers_nothing(lab):
    base = private_base({"VITALS_SHM": str(lab.shared)})
    lab.shared.chmod(0o1777)
    run_dir = RunDir.create(lab.shared / "runs", new_run_id(1_790_000_000_000_000_000))
    run_dir.command_key(create=True)
    folder = announce_run(base, run_dir.run_id, run_dir.path)
    Mailbox.create(folder / "mailbox").close()
    home = AgentStateDir(run_dir.agent_dir("node"), base)
    home.load_or_create_token()
    secrets = [folder / "mailbox", run_dir.path / "command.key", home.path / "read.token"]
    tries = [("cat", str(path)) for path in secrets]
    tries += [("ls", str(base)), ("touch", str(run_dir.path / "commands.json"))]
    for words in tries:
        done = subprocess.run(
            ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (1, "") == (min(done.returncode, 1), done.stdout), words
        assert "Permission denied" in done.stderr


THEIRS = """
mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /var/tmp
mkdir -m 700 /dev/shm/trainvitals-0; chown 12345 /dev/shm/trainvitals-0
"""


@pytest.mark.nightly
def test_a_folder_that_another_user_has_planted_costs_only_the_better_place(lab):
    done = train_in(lab, THEIRS, TMPDIR=str(lab.folder))
    assert done.stdout.startswith("trained "), done.stderr
    assert "/dev/shm/trainvitals-0 belongs to user 12345" in done.stderr
    assert f"{lab.folder}/trainvitals-0 is used instead" in done.stderr
    until(lambda: not lab.alive(), "the agent drains and ends")
    assert [STEPS] == list(num_steps(run_dirs(lab)[0]).values())


READ_ONLY = """
folder=$PWD
mount --rbind / /mnt
mount -o remount,bind,ro /mnt
mount --bind "$folder/runs" "/mnt$folder/runs"
mount -t tmpfs -o ro tmpfs /mnt/dev/shm
set -- chroot /mnt env -C "$folder/runs" "$@"
"""


@pytest.mark.slow
def test_a_container_in_which_only_the_run_directory_can_be_written_trains_without_a_journal(lab):
    lab.runs.mkdir()
    # PyTorch itself needs one folder for temporary files; it takes the working directory.
    done = train_in(lab, READ_ONLY, HOME="/nowhere", PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout.startswith("trained "), done.stderr
    assert "journal.folder" in done.stdout
    assert "training continues" in done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_shared_memory_the_journal_is_on_a_disk_and_nothing_is_missing(lab):
    done = train_in(lab, "mount -t tmpfs -o ro tmpfs /dev/shm", TMPDIR=str(lab.folder))
    assert done.stdout.endswith(" {}\n"), done.stdout + done.stderr
    until(lambda: not lab.alive(), "the agent drains and ends")
    assert [STEPS] == list(num_steps(run_dirs(lab)[0]).values())


@pytest.mark.slow
def test_shared_memory_as_docker_gives_it_filled_by_others_costs_rows_and_no_step(lab):
    fill = "mount -t tmpfs -o size=64m tmpfs /dev/shm; head -c 67m /dev/zero >/dev/shm/fill || true"
    done = train_in(lab, fill, TMPDIR=str(lab.folder))
    assert done.stdout.startswith("trained "), done.stderr
    until(lambda: not lab.alive(), "the agent drains and ends")
    assert run_dirs(lab) != []


@pytest.mark.slow
def test_a_folder_of_runs_that_is_gone_when_the_training_ends_costs_it_nothing(lab):
    need_namespaces()
    lab.runs.mkdir()
    stop = lab.folder / "stop"
    training = lab.start(
        "job", *with_mounts("true", sys.executable, "-c", PROGRAM, "job"), STOP=str(stop)
    )
    until(lambda: run_dirs(lab) and num_steps(run_dirs(lab)[0]), "the first rows are on the disk")
    inside = ("nsenter", "-t", str(training.pid), "-m")
    (agent,) = [pid for pid, words in lab.alive().items() if "vitals_agent" in words]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "ro", "x", str(lab.runs)], check=True)
    stop.touch()
    assert 0 == training.wait(60), lab.log("job").read_text()
    inside = ("nsenter", "-t", str(agent), "-m")
    subprocess.run([*inside, "umount", str(lab.runs)], capture_output=True, check=False)
    until(lambda: not lab.alive(), "the agent drains and ends")
    ((writer, rows),) = num_steps(run_dirs(lab)[0]).items()
    (batches,) = spooled(run_dirs(lab)[0]).values()
    steps = [first + num for _, stream, first, num in batches if stream == "steps"]
    assert ("rank:0", max(steps)) == (writer.split()[0], rows)
    assert rows >= STEPS


@pytest.mark.slow
def test_containers_of_one_name_each_have_an_agent_and_a_folder(lab):
    need_namespaces()
    port = str(free_port())
    ranks = []
    for rank in ("0", "1", "2"):
        # The first two share memory and have process ids of their own; the third shares nothing.
        mounts = "hostname worker; mount -t proc proc /proc"
        if rank == "2":
            mounts += "; mount -t tmpfs -o size=64m tmpfs /dev/shm"
        words = with_mounts(mounts, sys.executable, "-c", PROGRAM, "job")
        words[1:2] = ["--mount", "--uts", "--pid", "--fork", "--kill-child"]
        own = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": port}
        shared = "/dev/shm" if rank == "2" else str(lab.shared)
        where = {"MASTER_ADDR": "127.0.0.1", "VITALS_SHM": shared, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(lab.start(f"rank{rank}", *words, **own, **where))
    codes = [rank.wait(120) for rank in ranks]
    assert [0, 0, 0] == codes, "".join(lab.log(f"rank{n}").read_text()[-2000:] for n in range(3))
    until(lambda: not lab.alive(), "the agents drain and end")
    (run_dir,) = run_dirs(lab)
    assert [STEPS] * 3 == list(num_steps(run_dir).values())
    by_node = {
        node: {who.source for who, *_ in batches if who.source.startswith("rank")}
        for node, batches in spooled(run_dir).items()
    }
    assert [{"rank:0"}, {"rank:1"}, {"rank:2"}] == sorted(by_node.values(), key=str)
    assert all(node.startswith("worker-") for node in by_node)
    assert [] == [note.text for note in notes(run_dir) if note.code == "rank_gone"]


NODES = ("n1", "n2", "n3", "n4")


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestFourNodes:
    """The generated batch script on four nodes: told to stop, killed, each time queued again."""

    @pytest.fixture
    def cluster(self, lab):
        need_namespaces()
        made = Cluster(lab)
        made.begin(NODES)
        (lab.folder / "home").mkdir()
        (lab.folder / "train.py").write_text(
            PROGRAM.replace('mode="guard"', 'mode="guard", checkpoints=True')
        )
        return made

    def test_a_job_that_is_queued_again_goes_on_and_loses_nothing(self, cluster, lab):
        made = slurm_files(
            nodes=4, gpus=1, runs=str(lab.runs), command=f"{lab.folder}/train.py sbatch"
        )
        script = lab.folder / "vitals-train.sbatch"
        script.write_text(made["vitals-train.sbatch"])

        first = self.told_to_stop(cluster, lab, script)
        assert ["7"] == cluster.requeued()
        assert [0] * 4 == [len(self.journals(cluster, node)) for node in NODES]

        self.killed(cluster, lab, script, known=first)
        left = {node: self.journals(cluster, node) for node in NODES}
        assert [1] * 4 == [len(journals) for journals in left.values()]
        cluster.start_node("n4")
        second = set(num_steps(run_dirs(lab)[0])) - first

        third = self.told_to_stop(cluster, lab, script) - first - second
        (run_dir,) = run_dirs(lab)
        assert [4, 4, 4] == [len(first), len(second), len(third)]
        rows = num_steps(run_dir)
        of_second = {writer.split()[0]: rows[writer] for writer in second}
        assert of_second["rank:0"] - 2 <= of_second["rank:1"] <= of_second["rank:0"] + 2
        assert of_second["rank:0"] - 2 <= of_second["rank:2"] <= of_second["rank:0"] + 2
        assert of_second["rank:3"] < of_second["rank:0"] - 2, "n4 has lost its memory"
        said = [note.text for note in notes(run_dir) if note.code == "journal_lost"]
        assert [True] == [text.startswith("the journal of rank:3 was lost") for text in said]
        shown = lab.vitals("show", lab.runs, "--format", "json")
        assert (0, "") == (shown.returncode, shown.stderr)
        stored = json.loads(shown.stdout)["run"]["sources"]
        assert {0} == {source["num_lost_rows"] for source in stored}
        written = [num for batches in spooled(run_dir).values() for *_, num in batches]
        assert sum(written) == sum(source["num_rows"] for source in stored)

    def told_to_stop(self, cluster: Cluster, lab: Lab, script: Path) -> set[str]:
        """Run the job until its time is up; return who has written by then."""
        before = set(num_steps(run_dirs(lab)[0])) if run_dirs(lab) else set()
        job = cluster.sbatch(script, 7, STOP=str(lab.folder / "never"))
        self.wait_for_rows(lab, before)
        os.kill(job.pid, signal.SIGUSR1)
        log = lab.log("job-7")
        assert 0 != job.wait(300), log.read_text()[-3000:]
        until(lambda: not self.of_the_job(lab), "nothing is left of it")
        return set(num_steps(run_dirs(lab)[0]))

    def killed(self, cluster: Cluster, lab: Lab, script: Path, *, known: set[str]) -> None:
        """Run the job, stop its agents, and kill everything at once."""
        cluster.sbatch(script, 7, STOP=str(lab.folder / "never"))
        self.wait_for_rows(lab, known)
        found = self.of_the_job(lab)
        for pid, words in found.items():
            if "vitals_agent" in words:
                os.kill(pid, signal.SIGSTOP)
        seen = [self.journal_bytes(cluster, node) for node in NODES]
        until(
            lambda: all(
                self.journal_bytes(cluster, node) > size + 2
                for node, size in zip(NODES, seen, strict=True)
            ),
            "the ranks go on while their agents stand still",
        )
        for pid in self.of_the_job(lab):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not self.of_the_job(lab), "the job is gone")

    def wait_for_rows(self, lab: Lab, known: set[str]) -> None:
        def there() -> bool:
            rows = num_steps(run_dirs(lab)[0]) if run_dirs(lab) else Counter()
            return sum(rows[writer] > 20 for writer in rows if writer not in known) == len(NODES)

        until(there, "each rank has rows on the disk", 300.0)

    def of_the_job(self, lab: Lab) -> dict[int, str]:
        """Return what runs of the job: everything but the nodes themselves."""
        return {
            pid: words
            for pid, words in lab.alive().items()
            if "sleep infinity" not in words and not words.startswith("unshare")
        }

    def journals(self, cluster: Cluster, node: str) -> list[Path]:
        base = Path(f"/proc/{cluster.nodes[node]}/root/dev/shm/trainvitals-0")
        return [path for path in base.glob("*/*-*") if path.is_dir()]

    def journal_bytes(self, cluster: Cluster, node: str) -> int:
        """Return how many rows of steps lie in the node's journals."""
        rows = 0
        for path in self.journals(cluster, node):
            for batch in JournalReader(path).read(max_rows=1 << 20):
                rows += batch.header.num_rows if batch.header.stream == "steps" else 0
        return rows
