"""Commands come in here: rank 0 alone reads the mailbox, for the price of a memory read a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainvitals.clock import Clock
from trainvitals.errors import FormatError, VitalsError
from trainvitals.io.mailbox import Mailbox, verify_command
from trainvitals.records import Command, CommandAck


@dataclass(slots=True)
class Inbox:
    """Reads, verifies and hands on each command at most once."""

    mailbox: Mailbox
    key: bytes
    run_id: str
    clock: Clock
    last_number: int
    """Highest number applied or refused, from the plan journal: no restart applies one twice."""

    def poll(self, *, step: int, refuse: Callable[[CommandAck], None]) -> Command | None:
        """Return a new, valid command; an invalid one is refused with its reason."""
        number = self.mailbox.number()
        if number <= self.last_number:
            return None
        try:
            command = self.mailbox.read()
        except FormatError:
            return None  # torn: whole at the next step, or never
        last, self.last_number = self.last_number, number
        try:
            verify_command(
                command,
                self.key,
                run_id=self.run_id,
                now_unix_ns=self.clock.time_ns(),
                last_number=last,
            )
        except VitalsError as error:
            expired = self.clock.time_ns() > command.expires_unix_ns
            status = "expired" if expired else "invalid"
            refuse(
                CommandAck(number=command.number, status=status, step=step, detail=error.text)  # type: ignore[arg-type]
            )
            return None
        return command
