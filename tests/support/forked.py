"""Starts Python programs as forks of a process that has imported what they need.

To import torch, and what its first optimizer imports, is most of what a program of a few steps
does. A fork is a child of the test's own process, has its own environment, folder, arguments and
files, and ends as Python ends. What looks at how a program starts, or at its command line, starts
a real one.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.unsynced import skip_syncs

TORCHRUN = "torch.distributed.run"
_SET_CHILD_SUBREAPER, _SET_NAME = 36, 15
_MOST_BYTES, _MOST_FILES = 1 << 20, 16
FIRST = "vitals-forks"
"""The name of the process they are forks of, which stays."""
NAME = "FORKED_AS"
"""The variable with the name of the forks of a program: fifteen letters, seen in /proc/PID/comm."""
_call = ctypes.CDLL(None, use_errno=True).prctl


class Forks:
    """Starts programs that have the given modules; the process they are forks of starts at once."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()

    def Popen(self, command: Sequence[object], **options: Any) -> subprocess.Popen[Any]:  # noqa: N802 - it takes what subprocess.Popen takes
        """Start the program; what is not Python, or has options for it, is started as ever."""
        return _Fork(self, [str(word) for word in command], **options)

    def run(
        self,
        command: Sequence[object],
        *,
        input: str | bytes | None = None,
        capture_output: bool = False,
        timeout: float | None = None,
        check: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run the program to its end, as ``subprocess.run`` does."""
        if capture_output:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if input is not None:
            options["stdin"] = subprocess.PIPE
        with self.Popen(command, **options) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def start(self, wanted: dict[str, Any], files: list[int]) -> int:
        """Return the process id of a new fork, which is a child of this process."""
        with self._lock:
            channel = self._channel = self._channel or self._first()
            # What becomes an orphan below us is our child as long as this holds.
            _call(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(channel, [json.dumps(wanted).encode()], files)
                return int(channel.recv(64))
            finally:
                _call(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _first(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        clean = {name: v for name, v in os.environ.items() if not name.startswith("VITALS_")}
        with theirs:
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.forked",
                    str(theirs.fileno()),
                    *self._modules,
                ],
                env={**clean, "OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            ).returncode = 0  # it ends with us: nobody waits for it
        return ours


class _Fork(subprocess.Popen[Any]):
    def __init__(self, forks: Forks, command: list[str], **options: Any) -> None:
        self._forks = forks
        super().__init__(command, **options)

    def _execute_child(self, command: list[str], *others: Any) -> None:
        # Its arguments are those of Python 3.11 and later.
        executable, before, _close, keep, cwd, env, _info, _flags, shell, *others_left = others
        *files, _restore, gid, gids, uid, umask, session, group = others_left
        environ = dict(os.environ if env is None else env)
        is_plain = executable is before is gid is gids is uid is None and umask == -1 and not shell
        if not (is_plain and group in (None, -1) and _can_fork(command, environ)):
            super()._execute_child(command, *others)  # type: ignore[misc]
            return
        theirs = [files[0], files[3], files[5]]  # the ends of the pipes of its stdin and so on
        given = {n: n if file == -1 else file for n, file in enumerate(theirs)}
        given |= {file: file for file in keep}
        wanted = {
            "command": command,
            "folder": os.fspath(cwd or Path.cwd()),
            "environ": environ,
            "session": session,
            "files": list(given),
        }
        self.pid = self._forks.start(wanted, list(given.values()))
        self._child_created = True
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def _can_fork(command: list[str], environ: dict[str, str]) -> bool:
    known = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONWARNINGS"}
    of_python = {n for n in {*environ, *os.environ} if n.startswith("PYTHON")} - known
    return (
        command[0] == sys.executable
        and (command[1] in ("-c", "-m", "-u") or not command[1].startswith("-"))
        and all(environ.get(name) == os.environ.get(name) for name in of_python)
    )


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return it in the fork, and None where nobody asks any more."""
    while True:
        raw, files, _, _ = socket.recv_fds(channel, _MOST_BYTES, _MOST_FILES)
        if not raw:
            return None
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            _call(_SET_NAME, b"python", 0, 0, 0)
            if child := os.fork():
                os.write(tells, str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            channel.close()
            return json.loads(raw) | {"given": files}
        os.waitpid(between, 0)
        channel.send(os.read(told, 64))
        for file in (told, tells, *files):
            os.close(file)


def become(wanted: dict[str, Any]) -> None:
    """Make this fork what its request wants it to be, up to its program."""
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1000) for file in wanted["given"]]
    for path in list(Path("/proc/self/fd").iterdir()):
        if (file := int(path.name)) > 2 and file not in aside:
            with contextlib.suppress(OSError):  # the one that lists them
                os.close(file)
    for file, number in zip(aside, wanted["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    if wanted["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(wanted["environ"])
    os.chdir(wanted["folder"])
    if name := os.environ.get(NAME):
        _call(_SET_NAME, name.encode(), 0, 0, 0)
    line_buffering = os.isatty(1) or wanted["command"][1] == "-u"
    sys.stdout.reconfigure(line_buffering=line_buffering)  # type: ignore[union-attr]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    if words := os.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(words.split(","))  # type: ignore[attr-defined]


def run(command: list[str]) -> None:
    """Run a program as Python would, in a main module of its own."""
    command = [word for place, word in enumerate(command) if (place, word) != (1, "-u")]
    if command[1:3] == ["-m", TORCHRUN]:
        fork_ranks()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if command[1] == "-m":
        sys.argv, sys.path[0] = ["-m", *command[3:]], str(Path.cwd())
        runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
    elif command[1] == "-c":
        sys.argv, sys.path[0] = ["-c", *command[3:]], ""
        exec(compile(command[2], "<string>", "exec"), vars(main))
    else:
        path = Path(command[1]).resolve()
        sys.argv, sys.path[0], main.__file__ = command[1:], str(path.parent), command[1]
        exec(compile(path.read_bytes(), command[1], "exec"), vars(main))


def fork_ranks() -> None:
    """Have torchrun, which this fork will be, start its ranks as forks too.

    They are forks of a process of its own, which has no thread yet when it begins.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        subprocess_handler as handler,
    )

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        wanted = serve(theirs)
        if wanted is None:
            os._exit(0)
        begin(wanted)
        raise SystemExit
    theirs.close()
    forks = Forks()
    forks._channel = ours
    handler.Popen = lambda args, **options: forks.Popen(args, **options)


def begin(wanted: dict[str, Any]) -> None:
    """Be the program of a request."""
    become(wanted)
    run(wanted["command"])


TRAINING = Forks(
    "tests.support.watched",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.subprocess_handler",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel",
    "trainer_hooks._watch",
    "trainer_hooks.demo.inject",
    "trainer_hooks.demo.model",
    "trainer_hooks.monitor",
    "trainer_hooks.recovery.checkpoints.store",
)
"""For what trains, under torchrun, as ranks or alone."""
COMMANDS = Forks(
    "vitals_agent.agent",
    "vitals_collector.api.auth",
    "vitals_collector.api.serve",
    "vitals_collector.cli.collector",
)
"""For `vitals`, and what has no torch. DuckDB and pyarrow start threads: each imports its own."""

if __name__ == "__main__":
    _call(_SET_NAME, FIRST.encode(), 0, 0, 0)
    skip_syncs()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has no thread but its first"
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        begin(request)
