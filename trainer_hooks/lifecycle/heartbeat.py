"""The heartbeat of a rank: a side thread says twice a second what the training thread does.

The training thread only sets two attributes of its step clock. The side thread enters no
collective, holds nothing that the training thread needs, and is never waited for at the end. What
costs more than a few microseconds (the place in the code, torch's flight recorder) is looked at
only after nothing has moved for a while.
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

from trainer_hooks.failopen import FaultCounter
from trainvitals.io.heartbeat import COLLECTIVES_FILE, STACKS_FILE, HeartbeatWriter
from trainvitals.io.private import open_private, replace_file
from trainvitals.records import Heartbeat, OnHang

if TYPE_CHECKING:
    from trainer_hooks.measures.host import StepClock

BEAT_SECONDS = 0.5
PLACE_AFTER_SECONDS = 1.0
"""Without progress for this long, the place in the code is looked up."""
RECORDER_AFTER_SECONDS = 2.0
"""Without progress for this long, torch's flight recorder is asked, and again after as long."""
MAX_GROUPS = 16
"""Process groups whose sequence numbers are told; the page has a bound."""
NUM_COLLECTIVES = 20
"""The last ones of each group are kept."""
_NUM_TOLD, _MAX_TOLD_GROUPS = 3, 6
"""Of these the heartbeat itself tells."""
_MAX_TEXT = 120


class HeartbeatThread:
    """Writes this rank's heartbeat until it is closed. Made on the training thread.

    Args:
        directory: of the rank's journal.
        clock: knows phase, announcement and step.
        left_out: our own process group, whose collectives a thread of ours makes too.
        faults: counts what fails here; the first failures end nothing.
        on_hang: what the agent shall do about a hang that pages.

    Raises:
        OSError: the page cannot be had.
    """

    def __init__(
        self,
        directory: Path,
        clock: StepClock,
        *,
        left_out: dist.ProcessGroup | None,
        faults: FaultCounter,
        on_hang: OnHang = "alert",
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._left_out = left_out
        self._faults = faults
        self._on_hang = on_hang
        self._pid = os.getpid()
        self._writer = HeartbeatWriter(directory)
        self._ident = threading.get_ident()
        self._native = threading.get_native_id()
        # Taken here: of a thread that has ended the call is undefined, and its clock is an error.
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
        """Stop beating. Waits a moment at most; does nothing in a forked child."""
        if os.getpid() != self._pid or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(BEAT_SECONDS)
        if not self._thread.is_alive():
            self._beat_once()  # others may still wait for what this rank has not begun
            self._writer.close()

    def _run(self) -> None:
        while True:
            with self._faults.fail_open("heartbeat"):
                self._beat_once()
            if self._stopping.wait(BEAT_SECONDS):
                return

    def _beat_once(self) -> None:
        clock, now = self._clock, time.monotonic()
        step, phase, sequences = clock.step, clock.phase, self._sequences()
        moved = (step, phase, sequences)
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
            self._recorder.forget()
        still = now - self._moved_at
        where, is_debugged = "", False
        if still >= PLACE_AFTER_SECONDS:
            where, is_debugged = self._place()
        if still >= RECORDER_AFTER_SECONDS and sequences:
            self._recorder.ask(self._directory, sequences)
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
            stack_signal=_StackSignal.number(),
            last_collectives=self._recorder.newest,
            started=self._recorder.started,
            no_recorder=self._recorder.why_not,
            on_hang=self._on_hang,
        )
        self._writer.write(word)

    def _sequences(self) -> dict[str, int]:
        """Return how many collectives were begun in each group; empty where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        groups: list[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
        numbers: dict[str, int] = {}
        for group, name in groups[:MAX_GROUPS]:
            if group is not self._left_out:
                try:
                    numbers[str(name)[:64]] = int(group._get_sequence_number_for_group())
                except RuntimeError:
                    continue  # a backend that does not count: nothing can be said of this group
        return numbers

    def _place(self) -> tuple[str, bool]:
        """Return where the training thread is in the user's code, and whether a debugger has it."""
        frame: FrameType | None = sys._current_frames().get(self._ident)
        innermost, user_frame, is_debugged = "", "", False
        while frame is not None:
            file = frame.f_code.co_filename
            is_debugged = is_debugged or _is_of_debugger(file)
            if not (innermost and (user_frame or file.startswith(_FOREIGN))):
                text = f"{_short(file)}:{frame.f_lineno} ({frame.f_code.co_name})"[:_MAX_TEXT]
                innermost = innermost or text
                if not user_frame and not file.startswith(_FOREIGN):
                    user_frame = text
            frame = frame.f_back
        return user_frame or innermost, is_debugged


def _foreign() -> tuple[str, ...]:
    """Return where code lies that is not the user's own: of Python, of packages, and ours."""
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {str(Path(torch.__file__).parent), str(Path(__file__).parents[1])}
    return (*(f"{folder}{os.sep}" for folder in sorted(folders)), "<frozen ")


_FOREIGN = _foreign()


def _is_of_debugger(file: str) -> bool:
    return file.endswith((f"{os.sep}bdb.py", f"{os.sep}pdb.py")) or "pydevd" in file


def _short(file: str) -> str:
    """Return the file's last two names: where a program lies on a machine tells nobody."""
    return str(Path(*Path(file).parts[-2:]))


class _StackSignal:
    """A real-time signal at which Python writes all stacks beside the journal, if one is free.

    It is written by C, without the interpreter: also while C code holds that. A signal that
    somebody handles already is left alone, and one that somebody takes later is not told. It is
    never given back: the agent may have sent it just now, and unhandled it ends a process.
    """

    _number = 0
    """Of this process, once it was found."""
    _fd = -1

    @classmethod
    def write_to(cls, directory: Path) -> None:
        """Have the stacks written beside this journal from now on."""
        number = cls._number or free_signal()
        if not number or (cls._number and not cls.number()):
            return
        fd, before = open_private(directory / STACKS_FILE, _APPEND), cls._fd
        # Not chained: then the system goes on with the call that it interrupts.
        faulthandler.register(number, file=fd, all_threads=True, chain=False)
        cls._number, cls._fd = number, fd
        if before >= 0:
            os.close(before)

    @classmethod
    def number(cls) -> int:
        """Return the signal, 0 where there is none or somebody else has taken it since."""
        if cls._number and signal.getsignal(cls._number) is not signal.SIG_DFL:
            return 0
        return cls._number


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def free_signal() -> int:
    """Return a real-time signal that nobody handles, blocks or ignores; 0 where there is none."""
    last = getattr(signal, "SIGRTMAX", 0)
    taken = 0
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
            taken |= int(line.split()[1], 16)
    # Not the highest: a profiler or a debugger takes that.
    candidates = range(int(last) - 3, int(last) - 20, -1)
    return next((n for n in candidates if not taken >> (n - 1) & 1), 0)


class FlightRecorder:
    """Asks torch's recorder of collectives while nothing moves, and never for stacks.

    It asks repeatedly, because a device may continue while its host waits.
    """

    def __init__(self) -> None:
        self.newest: dict[str, dict[int, str]] = {}
        self.started: dict[str, int] = {}
        """By process group the last collective that the device has begun, if it is known."""
        self.why_not = ""
        self._asked_at = -math.inf

    def forget(self) -> None:
        """Begin anew: training has moved."""
        self.newest, self.started, self.why_not, self._asked_at = {}, {}, "", -math.inf

    def ask(self, directory: Path, sequences: dict[str, int]) -> None:
        """Keep the last collectives in a file beside the journal, and the newest of each group."""
        now = time.monotonic()
        if now - self._asked_at < RECORDER_AFTER_SECONDS:
            return
        if _is_capturing():
            return  # a question to the device would break the capture: at the next beat
        self._asked_at = now
        dump, name = _recorder_of(dist.get_backend())
        if dump is None:
            self.why_not = f"torch {torch.__version__} has no flight recorder ({name})"
            return
        raw: bytes | str = dump(True, False)
        trace = msgspec.json.decode(raw, type=_Trace, strict=False)
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
        lines = [entry.told for of_group in recent.values() for entry in of_group]
        replace_file(directory / COLLECTIVES_FILE, msgspec.json.encode(lines), mode=0o600)


class _RecorderEntry(msgspec.Struct, frozen=True):
    """What is taken of one entry of the recorder."""

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
        """The call in a line, equal on all ranks that made the same."""
        name = self.profiling_name.partition(":")[2] or self.profiling_name
        sizes = ", ".join("x".join(map(str, size)) or "scalar" for size in self.input_sizes)
        return f"{name}({sizes})"[:_MAX_TEXT]  # 6 x 3 of them fit into the page

    @property
    def told(self) -> dict[str, Any]:
        """The call as it is kept."""
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
    """Return the backend's function that dumps its recorder, and its name."""
    name = "_dump_nccl_trace_json" if "nccl" in backend else "_dump_fr_trace_json"
    return getattr(torch._C._distributed_c10d, name, None), name


def _is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the stream that torch takes by default.

    A capture on a stream of the loop's own is not seen.
    """
    if not torch.cuda.is_initialized():
        return False
    stream = torch.cuda.graph.default_capture_stream
    if stream is None:
        return False
    # Set and never put back: leaving a device would make a context on the process's first GPU.
    torch.cuda.set_stream(stream)
    return torch.cuda.is_current_stream_capturing()
