"""Carries commands into a run's mailbox, one at a time: verified, in order, each at most once."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from trainvitals.clock import Clock
from trainvitals.errors import StorageError, TransportError, VitalsError
from trainvitals.io.control_key import verify_manual_command
from trainvitals.io.mailbox import Mailbox, check_command, sign_command, verify_command
from trainvitals.question import Question
from trainvitals.records import Command, Note
from trainvitals.views import CommandsQuestion
from vitals_agent.backoff import Backoff
from vitals_agent.faults import Faults
from vitals_agent.run import ServedRun

A = TypeVar("A")
POLL_SECONDS = 1.0
ELSEWHERE_SECONDS = 4.0
"""Time between checks for requests of stacks on nodes without rank 0."""
_MAX_REFUSED = 64


class CommandClient(Protocol):
    """The delivery's interface of a collector."""

    def ask(self, question: Question[A]) -> A:
        """Return the collector's response to the agent's query for commands."""
        ...

    def mark_delivered(self, run_id: str, number: int, incarnation: str) -> object:
        """Report to the collector that the agent has put the command into the mailbox."""
        ...


@dataclass(slots=True)
class _RunCommands:
    """The commands of one run: pending ones, and the one in the mailbox without a response."""

    waiting: deque[tuple[Command, bool]] = field(default_factory=deque)
    in_mailbox: Command | None = None
    until: float = 0.0
    """Expiry of the one in the mailbox, in monotonic seconds."""
    newest: int = 0
    delivered: set[int] = field(default_factory=set)
    refused: dict[int, Command] = field(default_factory=dict)
    """Commands that were not genuine: reported once; later commands are still delivered."""
    polled_at: float = -ELSEWHERE_SECONDS
    stacks: int = 0
    """Number of the latest request for stacks, which the agent carries out itself, at once."""


class CommandDelivery:
    """Brings commands from the collector, and from files in the run directory, to rank 0.

    The agent itself carries out a request for stacks, on every node.

    The collector is not trusted: its commands must carry the signature of an operator's control
    key, and only then are they signed here with the run's key. A command in a file must carry that
    signature already: write access to a directory is not permission to control a run. ``keys`` is
    the directory of ``control.pub``.
    """

    def __init__(
        self,
        client: CommandClient | None,
        *,
        keys: Path,
        backoff: Backoff,
        clock: Clock,
        faults: Faults,
    ) -> None:
        self.num_delivered = 0
        self._client = client
        self._keys = keys
        self._backoff = backoff
        self._clock = clock
        self._faults = faults
        self._desks: dict[str, _RunCommands] = {}

    def relay(self, run: ServedRun, now: float, *, reachable: bool = True) -> None:
        """Relay the run's next command if rank 0 is on this node and has responded to the last.

        If no collector is ``reachable``, only files are read.
        """
        is_here = run.holds_mailbox
        if not (is_here or run.num_living_ranks):
            return
        desk = self._desks.setdefault(run.run_id, _RunCommands())
        if now - desk.polled_at >= (POLL_SECONDS if is_here else ELSEWHERE_SECONDS):
            desk.polled_at = now
            self._collect_commands(run, desk, now, reachable=reachable)
        if not is_here:
            desk.waiting.clear()  # they are for rank 0, whose agent has them as well
            return
        if desk.in_mailbox is not None:
            answered = run.acked_number() >= desk.in_mailbox.number
            if not answered and now < desk.until:
                return
            desk.in_mailbox = None
        while desk.waiting and desk.in_mailbox is None:
            command, must_be_signed = desk.waiting.popleft()
            self._deliver_command(run, desk, command, now, must_be_signed=must_be_signed)

    def forget(self, run_id: str) -> None:
        """Discard the commands of a run that the agent no longer serves."""
        self._desks.pop(run_id, None)

    def _collect_commands(
        self, run: ServedRun, desk: _RunCommands, now: float, *, reachable: bool
    ) -> None:
        """Poll the collector and the run directory for commands that the agent should relay."""
        # One agent takes the files of a directory that all nodes share.
        files = run.run_dir.take_commands() if run.holds_mailbox else []
        commands = [(command, True) for command in files]
        if self._client is not None and reachable and self._backoff.due(now):
            pending = CommandsQuestion(run_id=run.run_id, status="pending")
            try:
                for view in self._client.ask(pending):
                    if view.command.number in desk.delivered:
                        self._report_delivery(run, view.command.number)
                    elif view.command != desk.refused.get(view.command.number):
                        commands.append((view.command, False))
                self._backoff.record_success()
            except VitalsError as error:
                retry_after = (
                    error.retry_after_seconds if isinstance(error, TransportError) else 0.0
                )
                self._backoff.record_failure(now, retry_after=retry_after)
                self._faults.record("relay", error)
        for command, must_be_signed in sorted(commands, key=lambda item: item[0].number):
            if command.action == "stacks":
                self._request_stacks(run, desk, command, must_be_signed=must_be_signed)
            elif all(command.number != waiting.number for waiting, _ in desk.waiting):
                desk.waiting.append((command, must_be_signed))

    def _request_stacks(
        self, run: ServedRun, desk: _RunCommands, command: Command, *, must_be_signed: bool
    ) -> None:
        """Have the stacks of this node's ranks taken; a job that hangs reads no mailbox."""
        if command.number <= desk.stacks:
            return
        desk.stacks = command.number
        try:
            now_ns = self._clock.time_ns()
            if must_be_signed:
                key = run.run_dir.command_key()
                verify_command(command, key, run_id=run.run_id, now_unix_ns=now_ns, last_number=0)
            else:
                verify_manual_command(command, self._keys)
                check_command(command, run.run_id, now_ns)
        except VitalsError as error:
            self._record_refusal(run, desk, command, error)
            return
        self.num_delivered += 1
        run.stacks_wanted.append(command.number)

    def _record_refusal(
        self, run: ServedRun, desk: _RunCommands, command: Command, error: VitalsError
    ) -> None:
        """Report a command that the agent did not relay because it is not genuine."""
        if len(desk.refused) >= _MAX_REFUSED:
            desk.refused.clear()
        desk.refused[command.number] = command
        self._faults.record("relay.refused", error)
        text = f"command {command.number} ({command.action}) was not delivered: {error.text}"
        run.node_source.write_event(Note(code="command_refused", text=text, severity="warning"))

    def _deliver_command(
        self,
        run: ServedRun,
        desk: _RunCommands,
        command: Command,
        now: float,
        *,
        must_be_signed: bool,
    ) -> None:
        """Put a verified command into the mailbox of rank 0, which runs on the agent's node."""
        if command.number <= desk.newest:
            return  # already handled; the collector has not received the report yet
        path = run.folder / "mailbox"
        if not path.exists():
            text = f"{path} is missing: rank 0 started without room for it, and reads no commands"
            self._record_refusal(run, desk, command, StorageError(text))
            return
        with Mailbox.open(path) as mailbox:
            already_there = mailbox.number() == command.number
            try:
                key = run.run_dir.command_key()
                signed = command
                if not must_be_signed:
                    verify_manual_command(command, self._keys)
                    signed = sign_command(command, key)
                if not already_there:
                    verify_command(
                        signed,
                        key,
                        run_id=run.run_id,
                        now_unix_ns=self._clock.time_ns(),
                        last_number=mailbox.number(),
                    )
                    mailbox.put(signed)
                    self.num_delivered += 1
            except VitalsError as error:
                self._record_refusal(run, desk, command, error)
                return
        desk.newest = command.number
        desk.in_mailbox = signed
        desk.until = now + (command.expires_unix_ns - self._clock.time_ns()) / 1e9
        desk.delivered.add(command.number)
        if not must_be_signed:
            try:
                self._report_delivery(run, command.number)
            except VitalsError as error:
                self._faults.record("relay", error)  # it is reported again at the next poll

    def _report_delivery(self, run: ServedRun, number: int) -> None:
        """Report to the collector that the agent has put a command into rank 0's mailbox."""
        if self._client is not None:
            self._client.mark_delivered(run.run_id, number, run.rank0_incarnation)
