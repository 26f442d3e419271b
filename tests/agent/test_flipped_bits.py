"""Bits flip between agent and collector, on a real connection without TLS; each row is right."""

import random
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from sqlalchemy import select

from tests.agent.builders import RUN
from tests.agent.flipping_proxy import FlippingProxy, Flips
from tests.support.agent_clients import patient_client
from tests.support.examples import one_in
from tests.support.served import Served, served_in
from trainvitals.io.client import CollectorAddress
from vitals_agent.collector_endpoint import CollectorEndpoint
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage.schema import streams


class Way:
    """The way of an agent to a collector through a proxy."""

    def __init__(self, collector: Served) -> None:
        self.collector = collector
        self.proxy = FlippingProxy(urlsplit(collector.url).port, lambda body: None)
        address = CollectorAddress(url=self.proxy.url, tokens=collector.tokens)
        self.endpoint = CollectorEndpoint(lambda: address, connect=patient_client)

    def flip(self, flips: Flips) -> None:
        self.proxy.flips = flips

    def stored(self, rank: int) -> list[tuple[int, float]]:
        """Each stored step of a rank with its loss, in the order of their numbers."""
        span = RowSpan(RUN, "steps", sources=(f"rank:{rank}",))
        columns = self.collector.store.numbers.scan(span, ["step", "loss"])
        steps, losses = (columns[name].values.tolist() for name in ("step", "loss"))
        return sorted(zip(steps, losses, strict=True))

    def num_lost(self) -> int:
        with self.collector.store.read_transaction() as connection:
            return sum(connection.execute(select(streams.c.num_lost)).scalars())


@pytest.fixture
def way(tmp_path) -> Iterator[Way]:
    with served_in(tmp_path / "data") as collector:
        made = Way(collector)
        yield made
        made.endpoint.close()
        made.proxy.close()


def every(num: int, seed: int) -> Flips:
    """One bit, anywhere, of one in ``num`` bodies."""
    rng, bodies = random.Random(seed), 0

    def flips(body: bytes) -> int | None:
        nonlocal bodies
        bodies += 1
        return rng.randrange(8 * len(body)) if bodies % num == 0 else None

    return flips


def right(num_steps: int) -> list[tuple[int, float]]:
    return [(step, step / 2) for step in range(num_steps)]


def test_without_a_flip_each_row_comes_with_its_first_body(world, way):
    rank = world.rank()
    agent = world.agent(client=way.endpoint, reachable=way.endpoint.reachable)
    rank.step(*range(50))
    agent.cycle(0.0)
    assert right(50) == way.stored(0)
    assert (0, 0) == (agent.shipper.num_resent_batches, way.proxy.num_flipped)


@pytest.mark.parametrize("seed", one_in(2, range(2)))
def test_with_a_bit_flipped_in_every_third_body_each_row_arrives_once_and_right(world, way, seed):
    ranks = [world.rank(number) for number in range(2)]
    agent = world.agent(client=way.endpoint, reachable=way.endpoint.reachable)
    way.flip(every(3, seed))
    for step in range(24):
        for rank in ranks:
            rank.step(step)
        agent.cycle(float(step))
    way.flip(lambda body: None)
    for second in range(100, 1000, 100):
        agent.cycle(float(second))
    assert way.proxy.num_flipped > 4
    assert agent.shipper.num_resent_batches > 0
    assert {"V230"} <= way.collector.store.counters.rejected.keys()
    assert [right(24), right(24)] == [way.stored(0), way.stored(1)]
    assert (0, 0) == (way.num_lost(), agent.shipper.num_refused_rows)
    assert [] == agent.runs[RUN].spool.pending(1)


def test_while_one_stream_never_arrives_whole_the_others_go_on(world, way):
    ranks = [world.rank(number) for number in range(2)]
    agent = world.agent(client=way.endpoint, reachable=way.endpoint.reachable)
    writer = ranks[0].identity.incarnation.encode()

    def of_rank_0(body: bytes) -> int | None:
        return 8 * body.index(writer) if writer in body else None

    way.flip(of_rank_0)
    for step in range(12):
        for rank in ranks:
            rank.step(step)
        agent.cycle(10.0 * step)
    assert ([], right(12)) == (way.stored(0), way.stored(1))
    assert {"V230"} == way.collector.store.counters.rejected.keys()
    way.flip(lambda body: None)
    agent.cycle(1000.0)
    agent.cycle(1001.0)
    assert right(12) == way.stored(0)
    assert (0, 0) == (way.num_lost(), agent.shipper.num_refused_rows)
