"""A run of two nodes that rolled back once, as two agents saw it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.collector.rows import RUN, SECOND, Writer
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import (
    AttemptStarted,
    CheckpointChanged,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    RankStarted,
    RunEnded,
    RunInfo,
    RunStarted,
)
from vitals_collector.queries.open import Reader, open_reader

Batches = dict[str, list[bytes]]
"""What each node's agent has to tell."""


def story() -> Batches:
    """Return what two agents saw of a run on two nodes that rolled back once and finished."""
    ranks = [Writer("rank:0", node="node-a"), Writer("rank:1", node="node-b")]
    agents = [Writer("node:node-a", node="node-a"), Writer("node:node-b", node="node-b")]
    told: Batches = {"node-a": [], "node-b": []}
    finding = Finding(
        kind="nonfinite",
        level="actionable",
        step=40,
        detector="nonfinite",
        reason="nan",
        value=math.nan,
    )
    skip = Decision(
        ledger_seq=1,
        action="skip_step",
        step=40,
        decided_at_step=41,
        attempt=1,
        reason="the loss of step 40 is nan",
        rule="nonfinite",
        cause="nonfinite_loss",
        rank=1,
        evidence={"loss": math.nan, "limit": 3.0},
    )
    back = msgspec.structs.replace(
        skip, ledger_seq=2, action="rollback", step=90, decided_at_step=91, rollback_to_step=60
    )
    a, b = told["node-a"], told["node-b"]
    a.append(ranks[0].events(RunStarted(info=RunInfo(name="tiny", tags=("x",), world_size=2))))
    a.append(ranks[0].events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")))
    a.append(ranks[0].events(NamesDefined(stream="scalars", names={1: "val_loss"})))
    b.append(
        ranks[1].events(RankStarted(rank=1, local_rank=0, world_size=2, pid=101, node="node-b"))
    )
    for node, rank in zip((a, b), ranks, strict=True):
        for first in range(0, 90, 30):
            loss = [math.nan if s == 40 else 3.0 / (s + 1) for s in range(first, first + 30)]
            node.append(rank.steps(range(first, first + 30), loss=loss, rank_loss=loss))
    saved = CheckpointChanged(
        checkpoint_id="c60", checkpoint_step=60, state="healthy", where="disk"
    )
    a.append(ranks[0].events(FindingRaised(finding=finding), DecisionMade(decision=skip), step=41))
    a.append(ranks[0].events(saved, DecisionMade(decision=back), step=91))
    a.append(ranks[0].events(AttemptStarted(id=2, parent=1, fork_step=60, reason="rollback")))
    a.append(ranks[0].scalars(1, {50: 0.5, 100: 0.25}, attempt=2))
    for node, rank, agent in zip((a, b), ranks, agents, strict=True):
        rank.started += 100 * SECOND
        node.append(rank.steps(range(60, 120), attempt=2, loss=0.01, rank_loss=0.02, lose=2))
        node.append(agent.node_rows(range(0, 200, 20)))
        node.append(agent.process_rows(10, {rank.identity.rank: (100, 1)}))
        node.append(rank.events(Note(code="N1", text="bye"), RunEnded(state="finished"), step=119))
    return told


def _write(told: Batches, folder: Path) -> None:
    for node, raws in told.items():
        where = RunDir.create(folder, RUN).agent_dir(node) / "spool"
        spool = Spool(where, max_bytes=1 << 24, keep=True, file_bytes=8_192)
        for raw in raws:
            spool.append(raw)
        spool.close()


@contextmanager
def through_a_folder(told: Batches, tmp_path: Path) -> Iterator[Reader]:
    """Two agents write into one shared folder; a third process reads it without any server."""
    _write(told, tmp_path / "runs")
    with open_reader(tmp_path / "runs") as opened:
        yield opened.reader
