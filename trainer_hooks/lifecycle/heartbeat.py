"""Heartbeat of a rank: a thread publishes twice per second what the training thread does.

The training thread only sets two attributes of its step clock. The heartbeat thread enters no
collective, holds no lock that the training needs, and is not waited for at the end. Anything that
costs more than a few microseconds (the position in the code, torch's flight recorder) is read only
after a time without progress.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

import trainvitals
from trainer_hooks.failopen import FaultCounter
from trainvitals.io.heartbeat import COLLECTIVES_FILE, STACKS_FILE, HeartbeatWriter
from trainvitals.io.private import open_private, replace_file
from trainvitals.records import Heartbeat, OnHang, PipelineState

if TYPE_CHECKING:
    from trainer_hooks.measures.host import StepClock

BEAT_SECONDS = 0.5
PLACE_AFTER_SECONDS = 1.0
"""Without progress for this long, the position in the code is read."""
RECORDER_AFTER_SECONDS = 2.0
"""Without progress for this long, torch's flight recorder is read, and again after as long."""
MAX_GROUPS = 16
"""Process groups whose sequence numbers are published; the page has a fixed size."""
NUM_COLLECTIVES = 20
"""Latest collectives kept per group."""
_NUM_TOLD, _MAX_TOLD_GROUPS = 3, 6
"""Latest collectives per group, and groups, that fit into the heartbeat itself."""
_MAX_TEXT = 120


class HeartbeatThread:
    """Writes this rank's heartbeat until it is closed. Create it on the training thread.

    ``left_out`` is Vitals' own process group: background threads use it, so it is not published.

    Raises:
        OSError: the page cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        clock: StepClock,
        *,
        left_out: dist.ProcessGroup | None,
        faults: FaultCounter,
        place: str = "",
        on_hang: OnHang = "alert",
    ) -> None:
        """``place``: the rank's stages in a pipeline, which follow its code position."""
        self._directory = directory
        self._clock = clock
        self._left_out = left_out
        self._faults = faults
        self._place = place
        self._on_hang = on_hang
        self._pid = os.getpid()
        self._writer = HeartbeatWriter(directory)
        self._ident = threading.get_ident()
        self._native = threading.get_native_id()
        # Called here: for a thread that has ended it is undefined behavior.
        cpu_clock = getattr(time, "pthread_getcpuclockid", None)
        self._cpu_clock = None if cpu_clock is None else cpu_clock(self._ident)
        with faults.fail_open("heartbeat.stacks"):
            _StackSignal.write_to(directory)
        self._recorder = FlightRecorder()
        self._beat = 0
        self._moved: tuple[object, ...] = ()
        self._moved_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Waits briefly at most; does nothing in a forked child."""
        if os.getpid() != self._pid or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(BEAT_SECONDS)
        if not self._thread.is_alive():
            self._beat_once()  # publish the end: other ranks may wait for a collective of this rank
            self._writer.close()

    def _run(self) -> None:
        """Write the heartbeat at its interval until the thread is closed."""
        while True:
            with self._faults.fail_open("heartbeat"):
                self._beat_once()
            if self._stopping.wait(BEAT_SECONDS):
                return

    def _beat_once(self) -> None:
        """Write this rank's heartbeat; without progress, also its code position."""
        clock, now = self._clock, time.monotonic()
        step, phase, sequences = clock.step, clock.phase, self._sequences()
        moved = (step, phase, sequences)
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
            self._recorder.forget()
        still = now - self._moved_at
        where, is_debugged = "", False
        pipeline: PipelineState = "works" if self._place else ""
        if still >= PLACE_AFTER_SECONDS:
            where, is_debugged = self._code_position()
            if self._place:
                where = f"{where[: _MAX_TEXT - len(self._place) - 2]}, {self._place}"
                pipeline = "waits" if self._waits_for_ranks() else "works"
        if still >= RECORDER_AFTER_SECONDS and sequences:
            self._recorder.dump_collectives(self._directory, sequences)
        self._beat += 1
        word = Heartbeat(
            beat=self._beat,
            monotonic_ns=time.monotonic_ns(),
            step=step,
            phase=phase,
            is_announced=clock.is_announced,
            cpu_seconds=-1.0 if self._cpu_clock is None else time.clock_gettime(self._cpu_clock),
            thread=self._native,
            sequences=sequences,
            where=where,
            is_debugged=is_debugged,
            pipeline=pipeline,
            stack_signal=_StackSignal.number(),
            last_collectives=self._recorder.newest,
            started=self._recorder.started,
            no_recorder=self._recorder.why_not,
            on_hang=self._on_hang,
        )
        self._writer.write(word)

    def _sequences(self) -> dict[str, int]:
        """Return the number of started collectives by group; empty without process groups."""
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        groups: list[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
        numbers: dict[str, int] = {}
        for group, name in groups[:MAX_GROUPS]:
            if group is not self._left_out:
                try:
                    numbers[str(name)[:64]] = int(group._get_sequence_number_for_group())
                except RuntimeError:
                    continue  # the backend does not count, so this group is left out
        return numbers

    def _code_position(self) -> tuple[str, bool]:
        """Return the training thread's position in user code, and whether a debugger stopped it."""
        frame: FrameType | None = sys._current_frames().get(self._ident)
        innermost, user_frame, is_debugged = "", "", False
        while frame is not None:
            file = frame.f_code.co_filename
            is_debugged = is_debugged or _is_of_debugger(file)
            if not (innermost and (user_frame or file.startswith(_FOREIGN))):
                text = f"{_short_path(file)}:{frame.f_lineno} ({frame.f_code.co_name})"[:_MAX_TEXT]
                innermost = innermost or text
                if not user_frame and not file.startswith(_FOREIGN):
                    user_frame = text
            frame = frame.f_back
        return user_frame or innermost, is_debugged

    def _waits_for_ranks(self) -> bool:
        """Return whether the training thread is in a call of torch.distributed."""
        frame: FrameType | None = sys._current_frames().get(self._ident)
        return frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED)


def _library_prefixes() -> tuple[str, ...]:
    """Return path prefixes that a heartbeat skips as not the user's: Python, packages, Vitals."""
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    # Vitals' two packages are in other folders if they are installed in development mode.
    folders |= {str(Path(torch.__file__).parent), str(Path(__file__).parents[1])}
    folders |= {str(Path(trainvitals.__file__).parent)}
    return (*(f"{folder}{os.sep}" for folder in sorted(folders)), "<frozen ")


_FOREIGN = _library_prefixes()
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed") + os.sep


def _is_of_debugger(file: str) -> bool:
    """Return whether a frame's file, seen by the heartbeat, belongs to a Python debugger."""
    return file.endswith((f"{os.sep}bdb.py", f"{os.sep}pdb.py")) or "pydevd" in file


def _short_path(file: str) -> str:
    """Return the last two parts of a path for the heartbeat; the rest depends on the machine."""
    return str(Path(*Path(file).parts[-2:]))


class _StackSignal:
    """Real-time signal upon which Python dumps all stacks next to the journal.

    faulthandler writes them in C without the interpreter, so it also works while C code holds the
    GIL. A signal that already has a handler is not used. The handler is never removed: the agent
    may just have sent the signal, which would end the process.
    """

    _number = 0
    """Signal of this process; 0 until one was found."""
    _fd = -1

    @classmethod
    def write_to(cls, directory: Path) -> None:
        """Write the stacks of a stuck loop next to this journal from now on."""
        number = cls._number or free_signal()
        if not number or (cls._number and not cls.number()):
            return
        fd, before = open_private(directory / STACKS_FILE, _APPEND), cls._fd
        # chain=False restarts the interrupted system call.
        faulthandler.register(number, file=fd, all_threads=True, chain=False)
        cls._number, cls._fd = number, fd
        if before >= 0:
            os.close(before)

    @classmethod
    def number(cls) -> int:
        """Return the signal for a stuck loop's stacks; 0 if none, or if other code has taken it."""
        if cls._number and signal.getsignal(cls._number) is not signal.SIG_DFL:
            return 0
        return cls._number


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def free_signal() -> int:
    """Find a signal for a stuck loop: real-time, not handled, blocked or ignored; 0 if none."""
    last = getattr(signal, "SIGRTMAX", 0)
    taken = 0
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
            taken |= int(line.split()[1], 16)
    # Skip the highest ones, which profilers and debuggers use.
    candidates = range(int(last) - 3, int(last) - 20, -1)
    return next((n for n in candidates if not taken >> (n - 1) & 1), 0)


class FlightRecorder:
    """Reads torch's flight recorder while nothing moves, and never with stacks.

    It reads repeatedly, because a device may continue while its host waits.
    """

    def __init__(self) -> None:
        self.newest: dict[str, dict[int, str]] = {}
        self.started: dict[str, int] = {}
        """By process group the last collective that the device has begun, if it is known."""
        self.why_not = ""
        self._asked_at = -math.inf

    def forget(self) -> None:
        """Reset the heartbeat's flight recorder: training has made progress."""
        self.newest, self.started, self.why_not, self._asked_at = {}, {}, "", -math.inf

    def dump_collectives(self, directory: Path, sequences: dict[str, int]) -> None:
        """Write latest collectives to a file next to the heartbeat; keep each group's latest."""
        now = time.monotonic()
        if now - self._asked_at < RECORDER_AFTER_SECONDS:
            return
        if _is_capturing():
            return  # a device query would break the capture; try again at the next beat
        self._asked_at = now
        dump, name = _recorder_of(dist.get_backend())
        if dump is None:
            self.why_not = f"torch {torch.__version__} has no flight recorder ({name})"
            return
        self.read(dump(True, False), directory, sequences)

    def read(self, dumped: bytes | str, directory: Path, sequences: dict[str, int]) -> None:
        """Read torch's flight recorder dump for a heartbeat: each group's latest collectives."""
        self.started = {}
        trace = msgspec.json.decode(dumped, type=_Trace, strict=False)
        last: dict[str, list[_RecorderEntry]] = {}
        for entry in trace.entries:
            if entry.process_group and entry.process_group[0] in sequences and not entry.is_p2p:
                last.setdefault(entry.process_group[0], []).append(entry)
                status = trace.pg_status.get(str(entry.pg_id))
                if status is not None and status.last_started_collective >= 0:
                    self.started[entry.process_group[0]] = status.last_started_collective
        if not last:
            self.why_not = "torch's flight recorder is empty (TORCH_FR_BUFFER_SIZE=0?)"
            return
        recent = {group: of_group[-NUM_COLLECTIVES:] for group, of_group in last.items()}
        self.newest = {
            group: {entry.collective_seq_id: entry.text for entry in of_group[-_NUM_TOLD:]}
            for group, of_group in list(recent.items())[:_MAX_TOLD_GROUPS]
        }
        lines = [entry.to_record for of_group in recent.values() for entry in of_group]
        replace_file(directory / COLLECTIVES_FILE, msgspec.json.encode(lines), mode=0o600)


class _RecorderEntry(msgspec.Struct, frozen=True):
    """Fields of a flight recorder entry that are used."""

    pg_id: int = -1
    process_group: tuple[str, ...] = ()
    collective_seq_id: int = 0
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    state: str = ""
    is_p2p: bool = False

    @property
    def text(self) -> str:
        """Return the call in one line for the heartbeat; equal on all ranks that made this call."""
        name = self.profiling_name.partition(":")[2] or self.profiling_name
        sizes = ", ".join("x".join(map(str, size)) or "scalar" for size in self.input_sizes)
        return f"{name}({sizes})"[:_MAX_TEXT]  # 6 x 3 of them fit into the page

    @property
    def to_record(self) -> dict[str, Any]:
        """Return the call in the format of the file next to the heartbeat."""
        return {
            "group": self.process_group[0],
            "number": self.collective_seq_id,
            "call": self.text,
            "dtypes": self.input_dtypes,
            "state": self.state,
        }


class _GroupStatus(msgspec.Struct, frozen=True):
    """The recorder's counts of one process group; -1 where it does not know."""

    last_started_collective: int = -1


class _Trace(msgspec.Struct, frozen=True):
    entries: list[_RecorderEntry] = []
    pg_status: dict[str, _GroupStatus] = {}


def _recorder_of(backend: str) -> tuple[Callable[[bool, bool], bytes | str] | None, str]:
    """Return a backend's function that dumps its recorder for heartbeats, or None; its name."""
    name = "_dump_nccl_trace_json" if "nccl" in backend else "_dump_fr_trace_json"
    return getattr(torch._C._distributed_c10d, name, None), name


def _is_capturing() -> bool:
    """Return, for heartbeats, whether a CUDA graph captures the stream torch uses by default.

    A capture on another stream of the loop is not detected.
    """
    if not torch.cuda.is_initialized():
        return False
    stream = torch.cuda.graph.default_capture_stream
    if stream is None:
        return False
    # Set and never put back: leaving a device would make a context on the process's first GPU.
    torch.cuda.set_stream(stream)
    return torch.cuda.is_current_stream_capturing()
