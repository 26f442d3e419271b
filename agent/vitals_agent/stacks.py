"""Requests the ranks' stacks: once in each wait, and on an operator's request.

It uses a signal that the rank handles according to its heartbeat (Python's faulthandler writes the
stacks, even while C code holds the interpreter), otherwise py-spy if it is installed. A process
that is stopped, or that may be another one by now, never gets a signal.
"""

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, VitalsError
from trainvitals.io.heartbeat import COLLECTIVES_FILE, STACKS_FILE
from trainvitals.io.private import open_private, read_own
from trainvitals.records import (
    CommandAck,
    CommandAcknowledged,
    Heartbeat,
    ProcessState,
    StacksTaken,
)
from vitals_agent.process import holds_files
from vitals_agent.run import ServedRun
from vitals_agent.sampling import Spawn
from vitals_agent.tailer import JournalTail

MAX_STACKS = 16 << 10
"""Maximum bytes of a rank's stacks: the main thread's are the last."""
MAX_COLLECTIVES = 20
MAX_LOOKS = 6
"""Checks after which a rank that wrote nothing is given up."""
MORE_NODES_LOOKS = 16
"""Further checks until completion is reported: other nodes learn of a request later."""
_CANNOT: dict[ProcessState, str] = {
    "stopped": "its process is stopped (SIGSTOP)",
    "traced": "its process is stopped by a debugger",
    "gone": "its process is gone",
    "ended": "its process has ended",
}


@dataclass(slots=True)
class _PendingStack:
    """A rank that got its signal and has not responded yet."""

    tail: JournalTail
    word: Heartbeat
    step: int
    number: int = 0
    """Number of the operator's command; 0 if it was requested in a wait."""
    num_looks: int = 0


@dataclass(slots=True)
class _StackRequest:
    """An operator's request, until all available stacks were reported."""

    number: int
    num_here: int
    num_ranks: int
    num_answered: int = 0
    num_looks: int = 0


class StackTaker:
    """The stacks of one run's ranks on this node. For the agent's main thread.

    Args:
        run: run of the ranks, which also stores the stacks.
        spawn: starts calls that may hang.
    """

    def __init__(self, run: ServedRun, *, spawn: Spawn) -> None:
        self._run = run
        self._spawn = spawn
        self._pending: dict[Path, _PendingStack] = {}
        self._question: _StackRequest | None = None

    def start_request(self, number: int, *, num_here: int, num_ranks: int) -> None:
        """Start an operator's request for stacks on this node; then call ``ask`` for each rank.

        Args:
            number: number of the command.
            num_here: ranks on this node.
            num_ranks: ranks of the job.
        """
        self._question = _StackRequest(number, num_here, num_ranks)

    def ask(
        self, tail: JournalTail, word: Heartbeat, state: ProcessState, *, step: int, number: int = 0
    ) -> None:
        """Have a rank on this node write its stack, by a signal or by py-spy."""
        pending = _PendingStack(tail, word, step, number)
        if state in _CANNOT:
            if number:
                self._report_stack(pending, "", _CANNOT[state])
            return
        if (before := self._pending.get(tail.directory)) is not None:
            before.number = before.number or number
            return
        pid, path = tail.identity.pid, tail.directory / STACKS_FILE
        if not holds_files(pid, tail.directory):
            if number:
                self._report_stack(
                    pending, "", "its process cannot be reached from its agent's container"
                )
            return
        self._pending[tail.directory] = pending
        if word.stack_signal:
            os.close(open_private(path, os.O_WRONLY | os.O_TRUNC))
            os.kill(pid, word.stack_signal)
        elif program := shutil.which("py-spy"):
            self._spawn("vitals-agent-stacks", lambda: _dump_stacks(program, pid, path))

    def collect(self) -> None:
        """Store the stacks that this node's ranks wrote; give up ranks that write nothing."""
        for directory, pending in list(self._pending.items()):
            pending.num_looks += 1
            is_last = pending.num_looks > MAX_LOOKS
            raw = b""
            with contextlib.suppress(OSError, VitalsError):
                raw = read_own(directory / STACKS_FILE, max_bytes=8 << 20)
            if pending.num_looks == 1 or (not raw and not is_last):
                continue  # it may still be writing
            del self._pending[directory]
            why = "" if raw else "it did not answer its signal"
            if not raw and not pending.word.stack_signal:
                why = "no signal was free for its stacks, and py-spy is not installed"
            text = raw[-MAX_STACKS:].decode(errors="replace")
            self._report_stack(pending, text, why)
        self._acknowledge()

    def _report_stack(self, pending: _PendingStack, text: str, why: str) -> None:
        """Write a rank's stack, or why the agent has none, into the run."""
        tail, question = pending.tail, self._question
        if question is not None and question.number == pending.number:
            question.num_answered += bool(text)
        event = StacksTaken(
            rank=tail.identity.rank,
            stacks=text,
            # The file describes its last stall, which may be over.
            collectives=_collectives(tail.directory) if pending.word.last_collectives else (),
            detail=why,
            command_number=pending.number,
        )
        self._run.node_source.write_event(event, step=pending.step, attempt=tail.last.attempt)

    def _acknowledge(self) -> None:
        """Acknowledge the operator's request for stacks, on rank 0's node, at its end."""
        question = self._question
        if question is None:
            return
        question.num_looks += 1
        is_all_here = question.num_here >= question.num_ranks
        is_over = question.num_looks >= MORE_NODES_LOOKS
        if any(each.number for each in self._pending.values()) or not (is_all_here or is_over):
            return
        self._question = None
        if self._run.holds_mailbox:
            detail = f"{question.num_answered} of {question.num_here} ranks of this node answered"
            ack = CommandAck(number=question.number, status="done", step=-1, detail=detail)
            self._run.node_source.write_event(CommandAcknowledged(ack=ack))


def _collectives(directory: Path) -> tuple[str, ...]:
    """Return the last collectives of a rank that hangs, from its flight recorder's file."""
    try:
        calls = msgspec.json.decode(read_own(directory / COLLECTIVES_FILE), type=list[_Collective])
    except (OSError, VitalsError, *UNREADABLE):
        return ()
    return tuple(
        f"group {each.group} #{each.number}: {each.call} {each.state}".rstrip() for each in calls
    )[-MAX_COLLECTIVES:]


class _Collective(msgspec.Struct, frozen=True):
    """A collective from the file of a rank's flight recorder."""

    group: str
    number: int
    call: str
    state: str = ""


def _dump_stacks(program: str, pid: int, path: Path) -> None:
    """Have py-spy write the stacks of a rank that hangs; nothing without its permission."""
    done = subprocess.run(
        [program, "dump", "--pid", str(pid)], capture_output=True, timeout=10.0, check=False
    )
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(done.stdout)
