"""Bad input and bad luck from the outside: a clear error with a way out, and training unharmed."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.e2e.lab import PROGRAM, Lab, free_port, open_lab, until
from tests.support.forked import TRAINING
from tests.support.small_disks import fill, small_file_system
from trainvitals.identity import new_run_id
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.views import RunsQuestion

pytestmark = pytest.mark.servers

RUN = new_run_id(1_790_000_000_000_000_000)


@pytest.fixture
def lab(tmp_path):
    with open_lab(tmp_path) as opened:
        yield opened


def train(lab: Lab, **environ: str) -> subprocess.CompletedProcess[str]:
    """Train for some steps in one process."""
    return TRAINING.run(
        [sys.executable, "-c", PROGRAM],
        env=lab.environ(**environ),
        cwd=lab.folder,
        capture_output=True,
        text=True,
        timeout=60.0,
    )


def run_dir(lab: Lab) -> RunDir:
    made = RunDir.create(lab.runs, RUN)
    made.command_key(create=True)
    return made


@pytest.fixture
def small_tmpfs(tmp_path):
    """A file system of 128 KiB."""
    with small_file_system(tmp_path / "small", "128k") as folder:
        yield folder


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"VITALS_DIR": "/proc/x"}, "/proc/x/"),
        pytest.param({"VITALS_SHM": "/absent"}, "VITALS_SHM is '/absent'", marks=pytest.mark.slow),
        pytest.param(
            {"VITALS_RUN_ID": "../../etc"}, "run id is '../../etc'", marks=pytest.mark.slow
        ),
        pytest.param({"VITALS_MODE": "heal"}, "VITALS_MODE is 'heal'", marks=pytest.mark.slow),
        pytest.param({"VITALS_AGENT": "never"}, "VITALS_AGENT is 'never'", marks=pytest.mark.slow),
    ],
)
def test_a_setting_that_cannot_work_is_said_before_the_training_begins(lab, environ, said):
    done = train(lab, **{"VITALS_AGENT": "off", **environ})
    assert 1 == done.returncode
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "mode", "said"),
    [
        pytest.param("HALTED", b"", 0o644, "vitals resume", marks=pytest.mark.slow),
        pytest.param("command.key", b"00" * 32, 0o644, "chmod go-rwx", marks=pytest.mark.slow),
        pytest.param(
            "command.key", b"torn", 0o600, "64 hexadecimal characters", marks=pytest.mark.slow
        ),
        pytest.param(
            "plan.jsonl", b"garbage\n", 0o644, "plan.jsonl:1 is damaged", marks=pytest.mark.slow
        ),
        ("plan.jsonl", b'{"facts": 5}\n', 0o644, "plan.jsonl"),
    ],
)
def test_a_run_whose_promises_cannot_be_read_does_not_go_on_without_them(
    lab, name, content, mode, said
):
    path = run_dir(lab).path / name
    path.write_bytes(content)
    path.chmod(mode)
    done = train(lab, VITALS_RUN_ID=RUN, VITALS_AGENT="off")
    assert 1 == done.returncode
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert content == path.read_bytes()


@pytest.mark.slow
def test_what_is_only_for_people_may_be_torn(lab):
    directory = run_dir(lab)
    (directory.path / "run.json").write_text('{"name": "un')
    (directory.path / "plan.jsonl").write_text('{"facts": {"ro')
    assert f"trained {RUN} []\n" == train(lab, VITALS_RUN_ID=RUN, VITALS_AGENT="off").stdout
    assert "unlucky" == json.loads((directory.path / "run.json").read_text())["name"]


def test_a_full_disk_is_said_at_the_start_and_another_one_takes_the_run(lab, small_tmpfs, tmp_path):
    fill(small_tmpfs)
    (tmp_path / "tmp").mkdir()
    places = {"VITALS_DIR": str(small_tmpfs), "TMPDIR": str(tmp_path / "tmp")}
    done = train(lab, **places, VITALS_AGENT="off")
    assert 0 == done.returncode, done.stderr
    assert "No space left on device; the run is stored in" in done.stderr
    (run,) = RunDir.find_all(private_base({"VITALS_SHM": str(tmp_path / "tmp")}) / "vitals_runs")
    assert done.stdout.split()[1] == run.run_id
    assert "unlucky" == run.info().name


def test_shared_memory_without_room_is_said_and_training_goes_on(lab, small_tmpfs):
    done = train(lab, VITALS_SHM=str(small_tmpfs), VITALS_AGENT="off")
    assert 0 == done.returncode, done.stderr
    assert "['journal.full']" in done.stdout
    assert "its share of what is free" in done.stderr


@pytest.mark.slow
def test_full_shared_memory_is_said_and_training_goes_on_without_a_journal(lab, small_tmpfs):
    private_base({"VITALS_SHM": str(small_tmpfs)})
    fill(small_tmpfs)
    done = train(lab, VITALS_SHM=str(small_tmpfs), VITALS_AGENT="off")
    assert 0 == done.returncode, done.stderr
    assert "journal.folder failed" in done.stderr
    assert "No space left on device" in done.stderr


FULL = """
mount -t tmpfs -o size=1m tmpfs /dev/shm
mkdir -m 0700 /dev/shm/trainvitals-$(id -u)
head -c 1040384 /dev/zero > /dev/shm/fill
exec "$@"
"""


@pytest.mark.nightly
@pytest.mark.parametrize("free_bytes", [0, 8192])
def test_a_full_dev_shm_costs_the_journal_its_better_place_and_no_more(lab, tmp_path, free_bytes):
    environ = lab.environ(VITALS_AGENT="off", TMPDIR=str(tmp_path))
    del environ["VITALS_SHM"]
    fill_up = FULL.replace("1040384", str((1 << 20) - 4096 - free_bytes))
    command = ["unshare", "--mount", "sh", "-ec", fill_up, "sh", sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command,
        env=environ,
        cwd=lab.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert 0 == done.returncode, done.stderr
    assert f"{tmp_path}/trainvitals-{os.getuid()} is used instead" in done.stderr
    assert done.stdout.startswith("trained ")


@pytest.mark.slow
def test_a_collector_that_cannot_be_meant_costs_the_run_nothing(lab):
    settings = {"VITALS_COLLECTOR_URL": "nonsense", "VITALS_NODE": "rack 1/node:7"}
    done = train(lab, **settings)
    assert done.stdout.startswith("trained "), done.stderr
    found = RunDir.open(lab.runs / done.stdout.split()[1])
    gone = lambda: not list(found.path.glob("agents/*/agent.json"))  # noqa: E731
    until(lambda: found.spool_dirs() and gone() and not lab.alive(), "the agent drained and ended")
    assert ["rack-1-node-7"] == list(found.spool_dirs())
    shown = lab.vitals("show", found.path)
    assert "nothing is shipped: the collector's address is 'nonsense'" in shown.stdout
    assert re.search(r"^last step +29$", shown.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_collector_that_goes_while_a_run_is_followed_is_said(lab):
    port = free_port()
    collector = lab.collector(port)
    training = lab.start("train", sys.executable, "-c", PROGRAM.replace("30", "1_000_000"))
    agent = lab.agent(port)
    where = ("--collector", f"https://127.0.0.1:{port}", "--token-file", lab.tokens)
    with lab.client(port) as client:
        until(lambda: len(client.ask(RunsQuestion())) == 1, "the run is known")
    follow = lab.start_vitals("tail", "--follow", *where)
    until(lambda: "  grad norm " in lab.log("tail").read_text(), "it is followed")
    os.kill(collector.pid, signal.SIGKILL)
    assert 1 == follow.wait(20.0)
    said = lab.log("tail").read_text()
    assert ("cannot be reached" in said, "hint: " in said) == (True, True)
    assert "Traceback" not in said
    assert (None, None) == (training.poll(), agent.poll())
