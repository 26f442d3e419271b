"""Commands on their way to a run."""

from tests.agent.builders import RUN
from trainvitals.io.control_key import sign_manual_command
from trainvitals.io.mailbox import Mailbox
from trainvitals.records import Command
from trainvitals.views import CommandView

NS = 1_000_000_000


def command(world, number: int, *, ttl_seconds: float = 60.0, **fields) -> Command:
    now = world.clock.now_ns
    given = {"run_id": RUN, "action": "rollback", "reason": "loss looks odd"} | fields
    return Command(
        number=number,
        issued_by="ada",
        issued_unix_ns=now,
        expires_unix_ns=now + int(ttl_seconds * NS),
        **given,
    )


def pending(world, *commands: Command) -> list[CommandView]:
    """What a person signed, as a collector hands it out."""
    return [
        CommandView(command=sign_manual_command(each, world.keys), status="pending")
        for each in commands
    ]


def in_mailbox(world) -> Command | None:
    with Mailbox.open(world.base / RUN / "mailbox") as box:
        return box.read() if box.number() else None
