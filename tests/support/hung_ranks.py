"""Ranks in processes of their own that an agent watches."""

import os
import signal
import subprocess
import sys

from tests.agent.builders import World
from trainvitals.io.heartbeat import HeartbeatWriter
from trainvitals.records import FindingRaised, Heartbeat

RANK = """
import faulthandler, os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
faulthandler.register(int(sys.argv[2]), file=fd, all_threads=True)
print("ready", flush=True)
def load():
    sys.stdin.read()
load()
"""


SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 3


IN_A_CONTAINER = """
import os, sys
if os.getpid() != int(sys.argv[3]):
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(int(sys.argv[3]) - 1))
    if pid := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert os.getpid() == int(sys.argv[3])
"""


class Rank:
    """A rank whose process waits for its standard input, with the heartbeat that it would have.

    Args:
        world: where its journal lies.
        rank: its number.
        prelude: runs first in its process.
        pid_inside: its process id in a namespace of its own, as in a container; 0 is without one.
    """

    def __init__(self, world: World, rank: int, *, prelude: str = "", pid_inside: int = 0) -> None:
        folder = world.base.parent / f"stacks-{rank}"
        command = [sys.executable, "-c", f"{prelude}\n{RANK}", str(folder), str(SIGNAL)]
        if pid_inside:
            command[2] = f"{IN_A_CONTAINER}{command[2]}"
            command = ["unshare", "--pid", "--fork", "--mount-proc", *command, str(pid_inside)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        world.closers.append(self.end)
        self.process.stdout.readline()
        self.journal = world.rank(rank, pid=pid_inside or self.process.pid)
        folder.rename(self.journal.directory / "stacks")
        self.writer = HeartbeatWriter(self.journal.directory)
        world.closers.append(self.writer.close)
        self.beat = 0
        self.journal.step(0)

    def say(self, number: int, *, step: int = 5, **fields: object) -> None:
        self.beat += 1
        word = {"monotonic_ns": self.beat, "phase": "forward_backward", "stack_signal": SIGNAL}
        pid = self.journal.identity.pid
        word |= {"sequences": {"0": number}, "thread": pid, "step": step}
        self.writer.write(Heartbeat(beat=self.beat, **(word | fields)))

    def stop(self) -> None:
        """Stop the process, and return when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Let a stopped process go on, and return when it does."""
        self.process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, self.process.pid, os.WCONTINUED)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def train(agent, ranks: list[Rank], until: float, *, start: float = 0.0) -> float:
    """Let both make steps for so many seconds of the agent's clock."""
    now = start
    while now < until:
        for rank in ranks:
            rank.say(int(2 * now), step=int(2 * now))
        agent.run_once(now)
        now += 0.5
    return now


def told(world: World) -> list[tuple[str, int]]:
    findings = [row.event.finding for row in world.events() if isinstance(row.event, FindingRaised)]
    return [(finding.kind, finding.rank) for finding in findings]
