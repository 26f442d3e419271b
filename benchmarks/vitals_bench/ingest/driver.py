"""Simulated nodes in a process of their own: each posts its ranks' rows once a step.

    python -m vitals_bench.ingest.driver PLAN

Prints one line of JSON. It must be cheap, because it runs on the measured machine: one thread, a
plain connection for each node, and bodies in which only numbers change from step to step.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from trainvitals.io.client import read_tokens
from trainvitals.wire import OWNED_ELSEWHERE, OWNER_HEADER, IngestReply
from vitals_bench.ingest.records import RANKS_PER_NODE, Numbers, Writers, by_node
from vitals_bench.processes import Started

_TICK_SECONDS = 0.02
_CONNECTED_AT_ONCE = 64
_DRAIN_SECONDS = 120.0
_TIMEOUT_SECONDS = 5.0
"""After which a node asks another collector, as an agent does."""
_AGAIN_SECONDS = 0.5
_MOST_AGAIN_SECONDS = 8.0
"""What is not taken is sent again ever later, as an agent does; and no more of it at once."""
_MOST_BODIES = 32
"""Of a step each, in one post: 256 batches are in the largest of an agent."""
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_OWNER = re.compile(rb"%s: *http://([^/\r]+)" % OWNER_HEADER.encode(), re.IGNORECASE)
_replies = msgspec.json.Decoder(tuple[IngestReply, ...])


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate: runs that are all alike, each on nodes of its own."""

    addresses: tuple[str, ...]
    """HOST:PORT of each collector; the runs begin at them in turn."""
    token_file: str
    run_ids: tuple[str, ...]
    first_rank: int = 0
    num_nodes: int
    """Of each run."""
    world_size: int
    begin_ns: int
    num_steps: int
    step_ns: int = 1_000_000_000


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    num_rows: int
    """Rows that the collector called new."""
    num_posts: int
    num_again: int
    """Posts that were sent again: to the run's owner, or because no answer came."""
    num_unanswered: int
    """Nodes that still waited for an answer two minutes after the end."""
    refused: tuple[str, ...]
    late_seconds: float
    """How far the driver was behind at most."""
    reply_seconds: tuple[float, float]
    """From a post to its reply: the median and the 99th percentile."""
    cpu_share: float
    """CPU time of the driver itself, by the time that passed."""


class Node(asyncio.Protocol):
    """One node's connection. While a post is not answered the next bodies wait and go together.

    It follows redirects to the run's owner, and tries the next URL if one does not respond.
    """

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        self._addresses, self._token = addresses, token
        self._at = addresses[0]
        self._waiting: deque[bytes] = deque()
        self._posted = self._answer = b""
        self._posted_at = 0.0
        self._num_failures = 0
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.times: list[float] = []
        self.num_rows = self.num_again = 0
        self.refused: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether everything was answered."""
        return not self._posted and not self._waiting

    async def connect(self, address: str = "", after_seconds: float = 0.0) -> None:
        """Connect there, or to the next address after a while; send what was not answered."""
        self._at = address = address or self._at
        await asyncio.sleep(after_seconds)
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            made = loop.create_connection(lambda: self, host, int(port))
            await asyncio.wait_for(made, _TIMEOUT_SECONDS)
        except OSError:  # TimeoutError is one
            self._go(self._next(), self._later())

    def post(self, body: bytes) -> None:
        """Send the body, now or with the next."""
        self._waiting.append(body)
        if not self._posted:
            self._send_waiting()

    def end_slow_post(self, now: float) -> None:
        """Give up a collector that has not answered for too long."""
        if self._posted and now - self._posted_at > _TIMEOUT_SECONDS and self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport, self._answer = cast(asyncio.Transport, transport), b""
        if self._posted:
            self.num_again += 1
            self._send()
        elif self._waiting:
            self._send_waiting()

    def connection_lost(self, error: Exception | None) -> None:
        """Go to the next collector, or come back where it only ended an idle connection."""
        self._transport = None
        if self._posted:
            self._go(self._next(), self._later())
        else:
            self._go(self._at, _AGAIN_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Count what was stored once the answer is whole."""
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not separator or length is None or len(body) < int(length[1]):
            return
        self._answer = b""
        status = int(head.split(b" ", 2)[1])
        owner = _OWNER.search(head)
        if status == OWNED_ELSEWHERE and owner is not None:
            self._leave(owner[1].decode(), 0.0)
        elif status >= 500 or status == OWNED_ELSEWHERE:
            self._leave(self._at, self._later())
        else:
            self._num_failures = 0
            self.times.append(time.monotonic() - self._posted_at)
            self._posted = b""
            if status == 200:
                self._count(_replies.decode(body))
            else:
                self.refused.append(body[:200].decode(errors="replace"))
            if self._waiting:
                self._send_waiting()

    def _next(self) -> str:
        at = self._addresses.index(self._at) if self._at in self._addresses else -1
        return self._addresses[(at + 1) % len(self._addresses)]

    def close(self) -> None:
        """End the connection, and what would make another."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.set_protocol(asyncio.Protocol())  # its end is not this one's
            self._transport.close()
            self._transport = None

    def _leave(self, address: str, after_seconds: float) -> None:
        self.close()
        self._go(address, after_seconds)

    def _later(self) -> float:
        most = min(_MOST_AGAIN_SECONDS, _AGAIN_SECONDS * 2**self._num_failures)
        self._num_failures += 1
        return random.uniform(0.0, most)

    def _go(self, address: str, after_seconds: float) -> None:
        # Kept: the loop itself holds tasks weakly.
        self._connecting = asyncio.ensure_future(self.connect(address, after_seconds))

    def _count(self, replies: Sequence[IngestReply]) -> None:
        self.num_rows += sum(reply.num_new for reply in replies)
        self.refused += [reply.text for reply in replies if reply.code]

    def _send_waiting(self) -> None:
        if self._transport is not None:
            num = min(len(self._waiting), _MOST_BODIES)
            self._posted = b"".join(self._waiting.popleft() for _ in range(num))
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._posted_at = time.monotonic()
        head = (
            f"POST /v1/ingest HTTP/1.1\r\nHost: {self._at}\r\nAuthorization: Bearer {self._token}"
            "\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {len(self._posted)}\r\n\r\n"
        )
        self._transport.write(head.encode() + self._posted)


async def simulate(plan: Plan) -> Outcome:
    """Post every step of every node, each node at its own moment of the second."""
    nodes = await _connect(plan)
    num_ranks = plan.num_nodes * RANKS_PER_NODE
    ranks = range(plan.first_rank, plan.first_rank + num_ranks)
    runs = [Writers(run_id, ranks, world_size=plan.world_size) for run_id in plan.run_ids]
    numbers, late = Numbers(num_ranks, seed=1), 0.0
    began, cpu = time.monotonic(), time.process_time()
    for step in range(plan.num_steps):
        due = (plan.begin_ns + step * plan.step_ns - time.time_ns()) / 1e9
        late = max(late, -due)
        await asyncio.sleep(max(0.0, due))
        block = numbers.block(step, 1, begin_ns=plan.begin_ns, step_ns=plan.step_ns)
        bodies = [body for writers in runs for body in by_node(writers.batches(block))]
        await _post(nodes, bodies, plan.step_ns / 1e9)
    until = time.monotonic() + _DRAIN_SECONDS
    while not all(node.is_done for node in nodes) and time.monotonic() < until:
        await asyncio.sleep(_TICK_SECONDS)
        _end_slow_posts(nodes)
    passed = time.monotonic() - began
    for node in nodes:
        node.close()
    return _outcome(nodes, late, (time.process_time() - cpu) / passed)


async def _connect(plan: Plan) -> list[Node]:
    token = read_tokens(plan.token_file).ingest
    nodes = []
    for i in range(len(plan.run_ids)):
        at = i % len(plan.addresses)
        addresses = plan.addresses[at:] + plan.addresses[:at]
        nodes += [Node(addresses, token) for _ in range(plan.num_nodes)]
    for i in range(0, len(nodes), _CONNECTED_AT_ONCE):
        group = nodes[i : i + _CONNECTED_AT_ONCE]
        await asyncio.gather(*(node.connect() for node in group))
    return nodes


def _end_slow_posts(nodes: Sequence[Node]) -> None:
    now = time.monotonic()
    for node in nodes:
        node.end_slow_post(now)


async def _post(nodes: Sequence[Node], bodies: Sequence[bytes], seconds: float) -> None:
    """Post over nearly the whole step; what is left of it is for being late."""
    began, posted = time.monotonic(), 0
    while posted < len(nodes):
        share = (time.monotonic() - began) / (0.9 * seconds)
        upto = min(len(nodes), int(share * len(nodes)) + 1)
        for node, body in zip(nodes[posted:upto], bodies[posted:upto], strict=True):
            node.post(body)
        posted = upto
        _end_slow_posts(nodes)
        await asyncio.sleep(_TICK_SECONDS)


def _outcome(nodes: Sequence[Node], late: float, cpu_share: float) -> Outcome:
    times = [value for node in nodes for value in node.times] or [0.0]
    refused = [text for node in nodes for text in node.refused]
    return Outcome(
        num_rows=sum(node.num_rows for node in nodes),
        num_posts=sum(len(node.times) for node in nodes),
        num_again=sum(node.num_again for node in nodes),
        num_unanswered=sum(not node.is_done for node in nodes),
        refused=tuple(refused[:10]),
        late_seconds=late,
        reply_seconds=(float(np.median(times)), float(np.quantile(times, 0.99))),
        cpu_share=cpu_share,
    )


def started_driver(plan: Plan, folder: Path) -> Started:
    """Start the plan in a process of its own."""
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    return Started("driver", [sys.executable, "-m", __spec__.name, str(path)], folder)


def outcome_of(driver: Started) -> Outcome:
    """Return what became of the plan once the driver has ended.

    Raises:
        RuntimeError: it failed, or rows were refused.
    """
    driver.popen.wait(180.0)
    lines = driver.log.read_text().splitlines()
    try:
        outcome = msgspec.json.decode(lines[-1] if lines else "", type=Outcome)
    except msgspec.DecodeError:
        raise RuntimeError(f"the driver ended with: {lines[-5:]}") from None
    if outcome.refused:
        raise RuntimeError(f"the collector refused: {outcome.refused}")
    return outcome


def main() -> None:
    """Simulate the plan in the file that is named, and print what became of it."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    print(msgspec.json.encode(asyncio.run(simulate(plan))).decode(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
