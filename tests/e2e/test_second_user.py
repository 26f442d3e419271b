"""What another user of the node or of a shared folder can do to a run: a real one, who tries it.

The lab is a folder that a group may write, setgid, as labs have it; the other user is in the group.
"""

import contextlib
import logging
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import trainer_hooks
from tests.trainer_hooks.saving import Run, load_newest
from tests.trainvitals.io.builders import a_batch
from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainvitals.errors import CheckpointCorruptError, InsecurePathError, UsageError
from trainvitals.identity import Identity, new_run_id
from trainvitals.io.private import ensure_private_dir, private_base
from trainvitals.io.relaunch import earlier_run, remember_run
from trainvitals.io.rundir import HaltMarker, RunDir
from trainvitals.io.spool import Spool, read_batches
from vitals_agent.memory_spool import has_room
from vitals_agent.state_dir import AgentStateDir

KEY = b"k" * 32
RUN = "run"
LAUNCH = {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "1"}
GB = 1 << 30


class Other:
    """The second user, and the folder that both may write."""

    def __init__(self, account: pwd.struct_passwd, lab: Path) -> None:
        self.uid, self.gid, self.lab = account.pw_uid, account.pw_gid, lab

    def tries(self, script: str, *, where: Path | None = None) -> bool:
        """Run a shell script as this user; return whether all of it could be done."""
        done = subprocess.run(
            ["/bin/sh", "-ec", script],
            cwd=where or self.lab,
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            umask=0o002,
        )
        return done.returncode == 0

    def does(self, script: str, *, where: Path | None = None) -> None:
        """Run what this user is able to do: else the test would prove nothing."""
        assert self.tries(script, where=where), script


@pytest.fixture(scope="module")
def account() -> Iterator[pwd.struct_passwd]:
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("a second user can only be made by root, with useradd")
    name = f"vitals-t{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", "--user-group", name], check=True)
    try:
        yield pwd.getpwnam(name)
    finally:
        subprocess.run(["userdel", name], check=True)


@pytest.fixture
def other(account: pwd.struct_passwd) -> Iterator[Other]:
    base = Path(tempfile.mkdtemp(prefix="vitals-lab-"))
    base.chmod(0o755)
    lab = base / "lab"
    lab.mkdir()
    open_to_group(lab, account.pw_gid)
    try:
        yield Other(account, lab)
    finally:
        shutil.rmtree(base)


@pytest.fixture
def precious(other: Other) -> Path:
    """A file of ours that only we may write."""
    path = other.lab.parent / "precious"
    path.write_text("precious\n")
    return path


def open_to_group(path: Path, gid: int) -> None:
    os.chown(path, -1, gid)
    path.chmod(0o2775)


def an_older_run(other: Other) -> RunDir:
    """A run's folder as an earlier Vitals made it under a umask of 002: the group may write it."""
    path = other.lab / new_run_id(0)
    path.mkdir()
    open_to_group(path, other.gid)
    return RunDir(path)


def resumed(run_dir: RunDir) -> RunDir:
    return RunDir.create(run_dir.path.parent, run_dir.run_id)


def in_time(call: Callable[[], object]) -> None:
    """Do it; what waits for somebody who opens the other end of a FIFO would wait forever."""
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(InsecurePathError, OSError):  # refused is as good an end as any
            call()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(20), "it waits for a FIFO"


# ------------------------------------------------------------------------------ the run's folder


def test_a_training_in_a_folder_that_a_group_may_write_is_never_refused_nor_opened_to_it(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITALS_SHM", str(other.lab.parent))
    monkeypatch.setenv("VITALS_AGENT", "off")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with trainer_hooks.watch(
        model, optimizer, mode="heal", dir=other.lab, checkpoints=True
    ) as monitor:
        for _ in range(3):
            monitor.step(model(torch.ones(4, 2)).square().mean().backward())
        run_dir = next(path for path in other.lab.iterdir() if not path.name.startswith("."))
    assert 0o700 == stat.S_IMODE(run_dir.stat().st_mode) & 0o777
    assert 0o700 == stat.S_IMODE((run_dir / "checkpoints").stat().st_mode) & 0o777
    assert not other.tries(f"ls {run_dir}")
    assert not other.tries(f"echo > {run_dir}/HALTED")
    base = private_base(os.environ)
    assert not other.tries(f"ls {base}")
    assert not other.tries(f"mv {base}/{run_dir.name} {base}/away")


def test_a_run_that_is_shared_with_the_group_can_be_read_by_it_and_not_written(
    other: Other,
) -> None:
    run_dir = RunDir.create(other.lab, new_run_id(0), share="group")
    run_dir.append_plan({"budget": 1})
    run_dir.write_halted(HaltMarker(reason="shared"))
    run_dir.agent_dir("n1")
    assert 0o750 == stat.S_IMODE(run_dir.path.stat().st_mode) & 0o777
    for name in ("plan.jsonl", "HALTED"):
        other.does(f"cat {run_dir.path / name}")
        assert not other.tries(f"echo >> {run_dir.path / name}")
    other.does(f"ls {run_dir.path / 'agents' / 'n1'}")
    assert not other.tries(f"echo > {run_dir.path}/agents/n1/agent.json")
    assert not other.tries(f"cat {run_dir.path}/command.key")
    with pytest.raises(UsageError, match="VITALS_SHARE is 'all'; it must be none or group"):
        RunDir.create(other.lab, new_run_id(1), share="all")


def test_a_relaunch_writes_through_no_link_that_was_put_in_place_of_the_plan(
    other: Other, precious: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = an_older_run(other)
    run_dir.append_plan({"budget": 1})
    other.does(f"mv plan.jsonl away && ln -s {precious} plan.jsonl", where=run_dir.path)
    with pytest.raises(InsecurePathError, match="symbolic link"):
        run_dir.append_plan({"budget": 0})
    with caplog.at_level(logging.WARNING, "trainvitals"):
        again = resumed(run_dir)
    assert f"plan.jsonl belongs to user {other.uid}; it is refused" in caplog.text
    assert [] == again.read_plan()
    again.append_plan({"budget": 0})
    assert [{"budget": 0}] == again.read_plan()
    assert "precious\n" == precious.read_text()
    assert not other.tries(f"mv plan.jsonl away2 && ln -s {precious} plan.jsonl", where=again.path)


def test_nothing_is_written_into_a_file_of_ours_that_got_a_second_name(
    other: Other, precious: Path
) -> None:
    run_dir = an_older_run(other)
    precious.chmod(0o666)  # or the system itself keeps others from linking to it
    other.does(f"ln {precious} plan.jsonl", where=run_dir.path)
    precious.chmod(0o644)
    again = resumed(run_dir)
    with pytest.raises(InsecurePathError, match="has 2 names"):
        again.append_plan({"budget": 0})
    assert "precious\n" == precious.read_text()


def test_a_plan_that_was_moved_here_from_another_run_of_ours_is_refused(other: Other) -> None:
    rich, poor = an_older_run(other), RunDir(other.lab / new_run_id(1))
    poor.path.mkdir()
    open_to_group(poor.path, other.gid)
    rich.append_plan({"budget": 9})
    poor.append_plan({"budget": 0})
    other.does(f"mv {rich.path}/plan.jsonl {poor.path}/plan.jsonl")
    with pytest.raises(InsecurePathError, match=r"plan.jsonl:1 is not signed with this run's key"):
        resumed(poor).read_plan()


@pytest.mark.parametrize("marker", ['echo "{}" > HALTED', "ln -s / HALTED", "mkfifo HALTED"])
def test_a_halt_that_another_user_put_there_stops_no_training(
    other: Other, marker: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = an_older_run(other)
    other.does(marker, where=run_dir.path)
    assert run_dir.halted() is None
    with caplog.at_level(logging.WARNING, "trainvitals"):
        assert resumed(run_dir).halted() is None
    assert f"HALTED belongs to user {other.uid}; it is refused" in caplog.text
    run_dir.write_halted(HaltMarker(reason="ours"))
    assert resumed(run_dir).halted() is not None


def test_a_run_folder_of_another_user_is_not_gone_on_with(other: Other) -> None:
    run_id = new_run_id(0)
    other.does(f"mkdir {run_id}")
    with pytest.raises(InsecurePathError, match=f"belongs to user {other.uid}"):
        RunDir.create(other.lab, run_id)
    other.does(f"rmdir {run_id} && ln -s /root {run_id}")
    with pytest.raises(InsecurePathError, match=f"belongs to user {other.uid}"):
        RunDir.create(other.lab, run_id)


def test_a_key_of_another_user_signs_nothing(other: Other) -> None:
    run_dir = an_older_run(other)
    key = "ab" * 32
    other.does(f"printf {key} > command.key && chmod 644 command.key", where=run_dir.path)
    with pytest.raises(InsecurePathError, match=f"belongs to user {other.uid}"):
        run_dir.command_key()
    assert bytes.fromhex(key) != resumed(run_dir).command_key(create=True)


def test_what_a_restart_goes_on_with_is_not_told_by_another_user(other: Other) -> None:
    mine, theirs = new_run_id(0), new_run_id(1)
    remember_run(other.lab, LAUNCH, mine)
    [remembered] = [path for path in other.lab.iterdir() if path.name.startswith(".launches-")]
    [launch] = [path.name for path in remembered.iterdir()]
    assert not other.tries(f"echo {theirs} > {remembered}/{launch}")
    other.does(f"mv {remembered.name} away && mkdir {remembered.name}")
    other.does(f"echo {theirs} > {remembered.name}/{launch}")
    assert earlier_run(other.lab, LAUNCH) is None
    with pytest.raises(InsecurePathError, match=f"belongs to user {other.uid}"):
        remember_run(other.lab, LAUNCH, mine)


# -------------------------------------------------------------------------- what the agent reads


@pytest.mark.parametrize("name", ["state.json", "000003.tvs", "999999999999.tvs"])
@pytest.mark.parametrize(
    "planted", ["mkfifo {}", "ln -s {precious} {}", "cp {precious} {}", "mkdir {}"]
)
def test_what_another_user_put_into_the_spool_is_neither_read_nor_written(
    other: Other, precious: Path, identity: Identity, name: str, planted: str
) -> None:
    folder = other.lab / "spool"
    spool = Spool(folder, max_bytes=GB, keep=True)
    spool.append(a_batch(identity, 0, 5))
    spool.close()
    open_to_group(folder, other.gid)
    script = planted.format(name, precious=precious)
    other.does(f"rm -f {name} && {script}", where=folder)
    assert 1 == len(list(read_batches(folder)))
    again = Spool(folder, max_bytes=GB, keep=True)
    assert again.append(a_batch(identity, 5, 5))
    again.close()
    assert 2 == len(list(read_batches(folder)))
    assert "precious\n" == precious.read_text()
    assert not other.tries(f"echo > {folder}/000009.tvs"), "it is closed to others now"


@pytest.mark.parametrize("name", ["agent.json", "agent.lock", "read.token", ".room"])
def test_a_fifo_in_place_of_the_agents_files_makes_nothing_wait(other: Other, name: str) -> None:
    run_dir = an_older_run(other)
    node = run_dir.path / "agents" / "n1"
    node.mkdir(parents=True)
    open_to_group(node, other.gid)
    other.does(f"mkfifo {name}", where=node)
    state = AgentStateDir(node, node)

    def begin() -> None:
        assert has_room(node)
        state.acquire()
        state.load_or_create_token()

    def begin_another() -> None:
        with contextlib.suppress(UsageError):  # which names the agent that holds it
            AgentStateDir(node, node).acquire()

    in_time(begin)
    in_time(begin_another)
    in_time(state.is_held_by_another)


def test_neither_journal_nor_mailbox_can_be_swapped(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = private_base({"VITALS_SHM": str(other.lab)})
    run = ensure_private_dir(base / RUN)
    (run / "mailbox").write_bytes(bytes(4096))
    for script in (f"echo > {run}/mailbox", f"mv {run} {base}/away", f"mkfifo {base}/x"):
        assert not other.tries(script), script
    other.does(f"mv {base.name} away && mkdir {base.name}")
    with pytest.raises(InsecurePathError, match=f"belongs to user {other.uid}"):
        private_base({"VITALS_SHM": str(other.lab)})


# ---------------------------------------------------------------------------------- checkpoints


def a_run(other: Other, *, key: bytes = KEY) -> Run:
    folder = other.lab / "checkpoints"
    if not folder.exists():
        folder.mkdir()
        open_to_group(folder, other.gid)
    return Run(folder, run_id=RUN, key=key)


def test_a_part_of_a_checkpoint_that_another_user_planted_is_not_made_ours(
    other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(other)
    name = run.save()
    folder = run.store.folder.path
    planted = name.replace("step-00000002", "step-00000099")
    part = folder / ".theirs" / planted / "rank-0-of-1" / planted
    shutil.copytree(folder / name, part)  # as they may have it from anywhere
    content = manifests.read(folder / name)
    (part / "manifest.json").unlink()
    (part / "healthy").unlink(missing_ok=True)
    manifests.seal(part, msgspec.structs.replace(content, id=planted, step=99))
    for path in (folder / ".theirs", *(folder / ".theirs").rglob("*")):
        os.chown(path, other.uid, other.gid)
    other.does(f"mv .theirs .alone-{RUN}", where=folder)
    with caplog.at_level(logging.WARNING, "trainvitals"):
        again = a_run(other)
    assert f".alone-{RUN} is another user's; it is refused" in caplog.text
    assert [name] == again.store.folder.names()
    assert name == load_newest(again.store).id
    # The training writes its own parts where theirs lay.
    again.ring.capture(4, 7, {}, trusted=True)
    again.ring.commit(4, True)
    assert again.store.write_alone(again.ring.newest_committed())
    assert ["step-00000004-7"] == a_run(other).store.folder.names()[1:]


def test_a_part_of_ours_that_is_not_signed_is_not_adopted_where_others_may_write(
    other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(other, key=b"")
    run.step = 2
    run.ring.capture(2, 7, {}, trusted=True)
    run.ring.commit(2, True)
    assert run.store.write_alone(run.ring.newest_committed())
    home = run.store.folder.path / f".alone-{RUN}"
    open_to_group(next(home.glob("step-*/rank-*")), other.gid)
    with caplog.at_level(logging.WARNING, "trainvitals"):
        assert [] == a_run(other).store.folder.names()
    assert "is not signed with this run's key" in caplog.text
    next(home.glob("step-*/rank-*")).chmod(0o700)
    assert ["step-00000002-7"] == a_run(other).store.folder.names()


def test_a_checkpoint_of_another_user_is_told_and_passed_over(
    other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(other)
    name = run.save()
    planted = run.store.folder.path / name.replace("step-00000002", "step-00000099")
    other.does(f"mkdir {planted} && echo '{{}}' > {planted}/manifest.json")
    again = a_run(other)
    with caplog.at_level(logging.WARNING, "trainvitals"):
        assert name == load_newest(again.store).id
    assert f"checkpoint {planted.name} is another user's, and refused" in caplog.text
    with pytest.raises(InsecurePathError, match=f"belongs to user {other.uid}"):
        again.store.load(planted.name)
    assert planted.is_dir()


def test_what_is_not_signed_is_loaded_from_a_folder_that_only_we_may_write_and_from_no_other(
    other: Other,
) -> None:
    """As an earlier Vitals wrote it."""
    name = a_run(other, key=b"").save()
    folder = other.lab / "checkpoints"
    with pytest.raises(InsecurePathError, match="not signed with this run's key") as caught:
        load_newest(a_run(other).store)
    assert f"{folder} has mode 2775; other users can write there" in caught.value.text
    assert f"chmod go-w {folder}, or move {name} to a directory that you own" in caught.value.hint
    folder.chmod(0o755)
    assert name == load_newest(a_run(other).store).id


def test_what_is_signed_with_another_key_is_loaded_where_only_we_may_write(other: Other) -> None:
    """As where the run's folder was lost, and its key with it."""
    name = a_run(other).save()
    with pytest.raises(InsecurePathError, match="not signed with this run's key"):
        load_newest(a_run(other, key=b"x" * 32).store)
    (other.lab / "checkpoints").chmod(0o700)
    assert name == load_newest(a_run(other, key=b"x" * 32).store).id


def test_nothing_is_loaded_through_a_link_that_another_user_put_there(other: Other) -> None:
    run = a_run(other)
    name = run.save()
    other.does(f"mv {name} elsewhere && ln -s elsewhere {name}", where=run.store.folder.path)
    again = a_run(other)
    assert load_newest(again.store) is None
    with pytest.raises(CheckpointCorruptError, match="symbolic links are not accepted"):
        again.store.load(name)
