"""The sandbox of a drill: what a program in it cannot damage, and what it still can do."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.plugins.lab.drill.fingerprints import fingerprint
from trainvitals.errors import UsageError
from trainvitals.io.setting_paths import default_data_dir
from vitals_plugins.lab.drill import landlock, sandbox
from vitals_plugins.lab.drill.sandbox import offline_environ, sandboxed

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")

confined = pytest.mark.skipif(
    sandbox.unavailable_reason() is not None, reason=str(sandbox.unavailable_reason())
)


@contextmanager
def directory_in(parent):
    path = Path(tempfile.mkdtemp(prefix="vitals-test-", dir=parent)).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def outside(tmp_path):
    directory = tmp_path / "outside"
    (directory / "empty").mkdir(parents=True)
    (directory / "model.pt").write_text("weights")
    return directory


@pytest.fixture
def bystander():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        yield process
        process.kill()


@contextmanager
def attackers(copy, outside, bystander):
    """Yield the command of the intruder, with everything that it attacks."""
    (copy / "linked.pt").symlink_to(outside / "model.pt")
    name = f"vitals-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server, directory_in(SHARED_MEMORY) as shared:
        server.bind(f"\0{name}")
        server.listen()
        (shared / "journal").write_text("rows")
        program = [sys.executable, str(HERE / "intruder.py"), str(outside)]
        yield [*program, str(bystander.pid), name, str(shared / "journal")]


def run_attack(command, copy):
    """Return the attempts that succeeded: on content, and on metadata."""
    process = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert ("", 0) == (process.stderr, process.returncode)
    return json.loads(process.stdout)


@confined
def test_an_intruder_changes_nothing_outside(tmp_path, outside, bystander):
    copy = tmp_path / "copy"
    copy.mkdir()
    before = fingerprint(outside)
    with attackers(copy, outside, bystander) as program:
        damage, metadata = run_attack(sandboxed(program, [copy]), copy)
    assert [] == damage
    if len(sandbox.find_gaps()) == 1:
        assert [] == metadata
        assert before == fingerprint(outside)


@confined
def test_without_mounts_the_content_of_files_is_still_protected(tmp_path, outside, bystander):
    copy = tmp_path / "copy"
    copy.mkdir()
    with attackers(copy, outside, bystander) as program:
        script = f"""
            import sys; sys.path.insert(0, {str(Path(landlock.__file__).parent)!r})
            import os, landlock
            landlock.restrict_writes([{str(copy)!r}])
            os.execv(sys.executable, {program!r})"""
        damage, metadata = run_attack([sys.executable, "-c", textwrap.dedent(script)], copy)
    assert [] == damage
    assert "chmod" in metadata  # the gap that is reported
    assert "weights" == (outside / "model.pt").read_text()
    assert ["empty", "model.pt"] == sorted(path.name for path in outside.iterdir())


@confined
def test_the_same_attempts_succeed_in_a_writable_directory(tmp_path, outside, bystander):
    copy = tmp_path / "copy"
    copy.mkdir()
    with attackers(copy, outside, bystander) as program:
        damage, metadata = run_attack(sandboxed(program, [copy, outside]), copy)
    assert {"write", "truncate", "unlink", "rmtree", "through /proc", "fifo"} <= {*damage}
    assert {"create", "symbolic link", "child", "thread", "through a link"} <= {*damage}
    assert {"chmod", "chmod through a link", "times"} & {*metadata}


@confined
@pytest.mark.dist
@pytest.mark.parametrize(
    "arguments", [[], pytest.param(["compiled"], marks=[pytest.mark.slow])], ids=["", "compiled"]
)
def test_ranks_train_in_the_sandbox(arguments):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "ranks.py", *arguments]
    # The path of a socket in it must have at most 107 characters.
    with directory_in(tempfile.gettempdir()) as place:
        copy, private = place / "copy", place / "p"
        copy.mkdir()
        private.mkdir()
        shutil.copy(HERE / "ranks.py", copy)
        process = subprocess.run(
            sandboxed(command, [copy, private]),
            cwd=copy,
            env=offline_environ({**os.environ, "OMP_NUM_THREADS": "1"}, copy, private),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        assert 0 == process.returncode, process.stderr
        assert (copy / "out" / "model.pt").exists()


@confined
def test_data_in_shared_memory_can_still_be_read(tmp_path):
    with directory_in(SHARED_MEMORY) as shared:
        (shared / "data").write_text("samples")
        command = sandboxed(["cat", str(shared / "data")], [tmp_path.resolve()])
        assert b"samples" == subprocess.run(command, capture_output=True, check=True).stdout


@confined
def test_exit_codes_separate_the_sandbox_from_the_command(tmp_path):
    command = sandboxed(["sh", "-c", "exit 3"], [tmp_path])
    assert 3 == subprocess.run(command, check=False).returncode
    command = sandboxed(["no-such-program"], [tmp_path])
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (127, "no-such-program: No such file or directory\n") == (
        process.returncode,
        process.stderr,
    )
    (tmp_path / "gone").mkdir()
    command = sandboxed(["true"], [tmp_path / "gone"])
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").symlink_to("/")  # a link is never followed
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert landlock.FAILED == process.returncode
    assert "cannot be set" in process.stderr


def test_directories_with_files_of_others_cannot_be_writable(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "link").symlink_to(project)
    for path in (Path("/"), Path.home(), Path("/tmp"), SHARED_MEMORY, tmp_path / "link"):
        with pytest.raises(UsageError, match="must"):
            sandboxed(["true"], [path])
    with pytest.raises(UsageError, match="it has"):
        sandboxed(["true"], [tmp_path], protected=[project])


def test_trackers_collectors_and_credentials_of_real_runs_are_not_passed_on(tmp_path):
    home, private = tmp_path / "home", tmp_path / "p"
    private.mkdir()
    (home / ".cache" / "huggingface" / "hub").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "token").write_text("secret")
    (home / ".cache" / "huggingface" / "hub" / "model").write_text("weights")
    (tmp_path / "torch").mkdir()
    removed = {
        *("VITALS_RUN_ID", "VITALS_COLLECTOR_URL", "VITALS_COLLECTOR_RECEIVERS", "VITALS_NAME"),
        *("VITALS_TOKEN_FILE", "VITALS_COLLECTOR_DATABASE", "VITALS_MIRROR", "VITALS_AGENT"),
        *("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_API_KEY", "WANDB_SERVICE", "MLFLOW_RUN_ID"),
        *("COMET_API_KEY", "COMET_EXPERIMENT_KEY", "NEPTUNE_API_TOKEN", "NEPTUNE_CUSTOM_RUN_ID"),
        *("CLEARML_TASK_ID", "CLEARML_API_SECRET_KEY", "TRACKIO_SPACE_ID", "HF_TOKEN"),
        *("AIM_REPO", "SSH_AUTH_SOCK", "OTEL_EXPORTER_OTLP_ENDPOINT", "XDG_RUNTIME_DIR"),
    }
    kept = {
        "VITALS_MODE": "heal",
        "VITALS_CONFIG": "/etc/vitals.toml",
        "VITALS_LADDER_MARGIN": "3",
        "WANDB_PROJECT": "gpt",
        "HOME": str(home),
        "PATH": "/usr/bin",
    }
    replaced = {
        "MLFLOW_TRACKING_URI": "http://mlflow",
        "WANDB_MODE": "online",
        "TMPDIR": "/tmp",
        "VITALS_DIR": "/runs",
        "VITALS_SHM": "/dev/shm",
        "TORCH_HOME": str(tmp_path / "torch"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
    }
    environ = {**dict.fromkeys(removed, "real"), **kept, **replaced}

    result = offline_environ(environ, tmp_path / "copy", private)

    assert set() == removed & result.keys()
    assert kept == {name: result[name] for name in kept}
    assert [] == [name for name, value in replaced.items() if result[name] == value]
    assert "offline" == result["WANDB_MODE"]
    assert default_data_dir(result).is_relative_to(private)  # where the user's collector is found
    assert Path(result["TORCH_HOME"]).is_dir()
    hub = Path(result["XDG_CACHE_HOME"]) / "huggingface"
    assert "weights" == (hub / "hub" / "model").read_text()
    assert not (hub / "token").exists()


@confined
@pytest.mark.skipif(not sandbox.has_mount_namespace(), reason="no mount namespace")
def test_a_small_disk_in_the_sandbox_becomes_full_and_is_not_seen_outside(tmp_path):
    disk = tmp_path.resolve() / "disk"
    disk.mkdir()
    fill = 'cat /dev/zero >"$1/fill"; rm "$1/fill" && echo kept >"$1/file" && cat "$1/file"'
    command = sandboxed(
        ["sh", "-c", fill, "sh", str(disk)], [tmp_path.resolve()], small=(disk, 1 << 20)
    )
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "No space left on device" in process.stderr
    assert ("kept\n", []) == (process.stdout, list(disk.iterdir()))
