"""A run with a story: a layer grows, rank 1 loses its numbers, and the run goes back."""

import math
from collections.abc import Sequence

from tests.collector.rows import SECOND, Writer
from trainvitals.catalog import GPU_SCHEMA, LAYERS_SCHEMA
from trainvitals.records import (
    AttemptStarted,
    BatchNoted,
    ChangeExpected,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    RunEnded,
    RunInfo,
    RunStarted,
)
from vitals_collector.ingest.ingest import ingest, ingest_all
from vitals_collector.storage.store import Store

LAYERS = ("embed", "h.0", "h.1")
ONSET, BAD, BACK_TO = 158, 160, 120
"""Where the layer began to grow, where the loss was NaN, and where the run went back to."""


def finding(kind: str = "nonfinite", step: int = BAD, **how: object) -> FindingRaised:
    known: dict[str, object] = {
        "kind": kind,
        "level": "actionable",
        "step": step,
        "detector": kind,
        "reason": f"{kind} was seen at step {step}",
    }
    return FindingRaised(finding=Finding(**(known | how)))


def decision(action: str = "skip_step", step: int = BAD, **how: object) -> DecisionMade:
    known: dict[str, object] = {
        "ledger_seq": 1,
        "action": action,
        "step": step,
        "decided_at_step": step + 1,
        "attempt": 1,
        "reason": f"the loss of step {step} is nan",
        "rule": "nonfinite",
        "cause": "nonfinite_loss",
    }
    return DecisionMade(decision=Decision(**(known | how)))


def gpu_rows(
    writer: Writer,
    seconds: Sequence[int],
    values: Sequence[float],
    column: str = "temperature_celsius",
) -> bytes:
    at = GPU_SCHEMA.index[column]
    rows = []
    for second, value in zip(seconds, values, strict=True):
        row = [-1, 0, writer.started + second * SECOND, 0] + [None] * (len(GPU_SCHEMA.columns) - 4)
        row[at] = value
        rows.append(row)
    return writer.batch(GPU_SCHEMA, rows)


def layer_rows(writer: Writer, steps: Sequence[int], *, attempt: int = 1) -> bytes:
    rows = []
    for step in steps:
        for number in range(len(LAYERS)):
            norm = 1.0 + number + 0.01 * (step % 7)
            if attempt == 1 and number == 2 and step >= ONSET:
                norm = math.nan if step >= BAD else 500.0
            own = [step, attempt, writer.time_of(step), 0, number, norm, 10.0, 0.1]
            rows.append([*own, *[None] * (len(LAYERS_SCHEMA.columns) - len(own))])
    return writer.batch(LAYERS_SCHEMA, rows)


def troubled_run(store: Store, *, num_after: int = 150) -> list[Writer]:
    """Store it: two ranks, steps to 161, back to 120, and ``num_after`` steps more."""
    ranks = [Writer(f"rank:{rank}") for rank in range(2)]
    head, sent = ranks[0], list[bytes]()
    sent.append(head.events(RunStarted(info=RunInfo(name="story", mode="heal", world_size=2))))
    sent.append(head.events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")))
    sent.append(head.events(NamesDefined(stream="layers", names=dict(enumerate(LAYERS)))))
    sent += _train(ranks, range(BAD + 2), 1)
    at_bad = {"step": BAD, "at": head.time_of(BAD)}
    found = finding(rank=1, onset_step=ONSET, cause="nonfinite_loss")
    sent.append(head.events(found, decision(rank=1, cost_steps=1), **at_bad))
    noted = BatchNoted(epoch=0, first_batch=77, num_batches=1, sample_ids=(5, 9), num_samples=2)
    sent.append(ranks[1].events(noted, **at_bad))
    slow = finding("straggler", BAD + 1, level="advisory", rank=0, cause="straggler")
    sent.append(head.events(slow, step=BAD + 1))
    back = decision(
        "rollback", BAD + 1, ledger_seq=2, rollback_to_step=BACK_TO, new_attempt=2,
        decided_at_step=BAD + 1, checkpoint_id="memory-120", reason="the storm did not end",
    )  # fmt: skip
    sent.append(head.events(back, step=BAD + 1, at=head.time_of(BAD + 1)))
    node = Writer("node:a")
    said = Note(code="gpu_xid", text="Xid 48 on GPU-1", severity="warning")
    sent.append(node.events(said, step=-1, attempt=0, at=head.time_of(BAD)))
    gpu = Writer("gpu:GPU-1")
    seconds = range(0, BAD + 2, 2)
    heat = [60.0 + (s % 6) / 10 if s < BAD else 91.0 for s in seconds]
    sent.append(gpu_rows(gpu, seconds, heat))
    for writer in ranks:
        writer.started += 100 * SECOND
    again = AttemptStarted(id=2, parent=1, fork_step=BACK_TO, reason="rollback")
    sent.append(head.events(again, step=BACK_TO, attempt=2))
    sent += _train(ranks, range(BACK_TO, BACK_TO + num_after), 2)
    change = ChangeExpected(reason="longer context", steps=100)
    sent.append(head.events(change, step=130, attempt=2))
    ingest_all(store, sent, 0)
    return ranks


def end(store: Store, ranks: Sequence[Writer], state: str = "finished") -> None:
    for writer in ranks:
        ingest(store, writer.events(RunEnded(state=state), step=400, attempt=2))  # type: ignore[arg-type]


def _train(ranks: Sequence[Writer], steps: range, attempt: int) -> list[bytes]:
    sent = []
    for rank, writer in enumerate(ranks):
        loss = [2.0 + 0.01 * (s % 5) for s in steps]
        if attempt == 1:
            loss[BAD] = math.nan if rank == 1 else 2.0
        own = {"rank_loss": loss, "step_duration_seconds": 0.5}
        if rank == 0:
            whole = list(loss)
            if attempt == 1:
                whole[BAD] = math.nan
            own |= {"loss": whole, "grad_norm": 1.0, "learning_rate": 3e-4}
        sent.append(writer.steps(steps, attempt=attempt, **own))
    return [*sent, layer_rows(ranks[0], steps, attempt=attempt)]
