"""Simulated nodes in a process of their own: each posts its ranks' rows once a step.

    python -m vitals_bench.ingest.driver PLAN

Prints one line of JSON. It must be cheap, because it runs beside what is measured: one thread, a
plain connection for each node, and bodies of which only numbers change from step to step.
"""

from __future__ import annotations

import asyncio
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
from trainvitals.wire import IngestReply
from vitals_bench.ingest.records import RANKS_PER_NODE, Numbers, Writers, by_node

_TICK_SECONDS = 0.02
_CONNECTED_AT_ONCE = 64
_DRAIN_SECONDS = 60.0
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_replies = msgspec.json.Decoder(tuple[IngestReply, ...])


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate."""

    host: str
    port: int
    token_file: str
    run_id: str
    first_rank: int
    num_nodes: int
    world_size: int
    begin_ns: int
    num_steps: int
    step_ns: int = 1_000_000_000


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    num_rows: int
    """Rows that the collector called new."""
    num_posts: int
    num_unanswered: int
    """Nodes that still waited for an answer a minute after the end."""
    refused: tuple[str, ...]
    late_seconds: float
    """How far the driver was behind at most."""
    reply_seconds: tuple[float, float]
    """From a post to its reply: the median and the 99th percentile."""
    cpu_share: float
    """CPU time of the driver itself, by the time that passed."""


class Node(asyncio.Protocol):
    """One node's connection. While a post is not answered the next bodies wait and go together."""

    def __init__(self, head: str) -> None:
        self._head = head
        self._waiting: deque[bytes] = deque()
        self._answer = b""
        self._posted_at = 0.0
        self.transport: asyncio.Transport | None = None
        self.times: list[float] = []
        self.num_rows = 0
        self.refused: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether everything was answered."""
        return not self._posted_at and not self._waiting

    def post(self, body: bytes) -> None:
        """Send the body, now or with the next."""
        self._waiting.append(body)
        if not self._posted_at:
            self._send()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Count it as refused where an answer was still waited for."""
        if not self.is_done:
            self.refused.append(f"connection lost: {error}")

    def data_received(self, data: bytes) -> None:
        """Count what was stored once the answer is whole."""
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not separator or length is None or len(body) < int(length[1]):
            return
        self._answer = b""
        self.times.append(time.monotonic() - self._posted_at)
        self._posted_at = 0.0
        if head.split(b" ", 2)[1] == b"200":
            self._count(_replies.decode(body))
        else:
            self.refused.append(body[:200].decode(errors="replace"))
        if self._waiting:
            self._send()

    def _count(self, replies: Sequence[IngestReply]) -> None:
        self.num_rows += sum(reply.num_new for reply in replies)
        self.refused += [reply.text for reply in replies if reply.code]

    def _send(self) -> None:
        assert self.transport is not None
        body = b"".join(self._waiting)
        self._waiting.clear()
        self._posted_at = time.monotonic()
        self.transport.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def simulate(plan: Plan) -> Outcome:
    """Post every step of every node, each node at its own moment of the second."""
    nodes = await _connect(plan)
    num_ranks = plan.num_nodes * RANKS_PER_NODE
    ranks = range(plan.first_rank, plan.first_rank + num_ranks)
    writers = Writers(plan.run_id, ranks, world_size=plan.world_size)
    numbers, late = Numbers(num_ranks, seed=1), 0.0
    began, cpu = time.monotonic(), time.process_time()
    for step in range(plan.num_steps):
        due = (plan.begin_ns + step * plan.step_ns - time.time_ns()) / 1e9
        late = max(late, -due)
        await asyncio.sleep(max(0.0, due))
        block = numbers.block(step, 1, begin_ns=plan.begin_ns, step_ns=plan.step_ns)
        await _post(nodes, by_node(writers.batches(block)), plan.step_ns / 1e9)
    until = time.monotonic() + _DRAIN_SECONDS
    while not all(node.is_done for node in nodes) and time.monotonic() < until:
        await asyncio.sleep(_TICK_SECONDS)
    passed = time.monotonic() - began
    return _outcome(nodes, late, (time.process_time() - cpu) / passed)


async def _connect(plan: Plan) -> list[Node]:
    token = read_tokens(plan.token_file).ingest
    head = (
        f"POST /v1/ingest HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n"
        f"Authorization: Bearer {token}\r\nContent-Type: application/octet-stream\r\n"
    )
    nodes = [Node(head) for _ in range(plan.num_nodes)]
    loop = asyncio.get_running_loop()
    for i in range(0, len(nodes), _CONNECTED_AT_ONCE):
        group = nodes[i : i + _CONNECTED_AT_ONCE]
        await asyncio.gather(
            *(
                loop.create_connection(lambda node=node: node, plan.host, plan.port)  # type: ignore[misc]
                for node in group
            )
        )
    return nodes


async def _post(nodes: Sequence[Node], bodies: Sequence[bytes], seconds: float) -> None:
    """Post over nearly the whole step; what is left of it is for being late."""
    began, posted = time.monotonic(), 0
    while posted < len(nodes):
        share = (time.monotonic() - began) / (0.9 * seconds)
        upto = min(len(nodes), int(share * len(nodes)) + 1)
        for node, body in zip(nodes[posted:upto], bodies[posted:upto], strict=True):
            node.post(body)
        posted = upto
        await asyncio.sleep(_TICK_SECONDS)


def _outcome(nodes: Sequence[Node], late: float, cpu_share: float) -> Outcome:
    times = [value for node in nodes for value in node.times] or [0.0]
    refused = [text for node in nodes for text in node.refused]
    return Outcome(
        num_rows=sum(node.num_rows for node in nodes),
        num_posts=sum(len(node.times) for node in nodes),
        num_unanswered=sum(not node.is_done for node in nodes),
        refused=tuple(refused[:10]),
        late_seconds=late,
        reply_seconds=(float(np.median(times)), float(np.quantile(times, 0.99))),
        cpu_share=cpu_share,
    )


def main() -> None:
    """Simulate the plan in the file that is named, and print what became of it."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    print(msgspec.json.encode(asyncio.run(simulate(plan))).decode(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
