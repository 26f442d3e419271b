"""Clients of an agent that answer as planned."""

import threading

from trainvitals.errors import TransportError
from trainvitals.io.client import CollectorAddress
from trainvitals.wire import IngestReply, decode_batch
from vitals_agent.collector_endpoint import AgentClient


def patient_client(address: CollectorAddress) -> AgentClient:
    """Return a client that waits for an answer as long as a busy machine may take."""
    return AgentClient(address, timeout=60.0)


class Stalled:
    """A collector whose answer to ingest comes when the test says so."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def ingest_all(self, raws, *, asks=False, writer_key=""):
        self.asked.set()
        assert self.go_on.wait(60.0)
        headers = [decode_batch(raw).header for raw in raws]
        return [IngestReply(durable_seq=h.last_seq, num_new=1, num_duplicate=0) for h in headers]

    def ask(self, question):
        return ()

    def mark_delivered(self, run_id, number, incarnation):
        raise TransportError("away")


class Later:
    """Begins what it is given when the test says so."""

    def __init__(self) -> None:
        self.begun = []

    def __call__(self, name, function):
        self.begun.append(function)

    def finish(self) -> None:
        self.begun.pop(0)()
