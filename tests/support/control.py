"""The command line, as a person uses it on a run."""

from functools import cache

from tests.collector.alerting import started
from tests.collector.rows import Writer
from tests.support.replays import COURSE, columns
from trainvitals.cli.main import main
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.policy import Judge
from trainvitals.records import CheckpointChanged, DecisionMade
from trainvitals.testing import judgements


def run_cli(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def spool_of(run_dir: RunDir, parts: list[bytes]) -> None:
    spool = Spool(run_dir.agent_dir("node-a") / "spool", max_bytes=1 << 24, keep=True)
    for raw in parts:
        spool.append(raw)
    spool.close()


@cache
def judged_run() -> list[bytes]:
    """Return what rank 0 of a run in guard mode writes."""
    writer = Writer()
    said = judgements(Judge(mode="guard"), COURSE)
    healthy = CheckpointChanged(
        checkpoint_id="c1", checkpoint_step=5, state="healthy", where="memory"
    )
    parts = [writer.events(started("guard"), healthy)]
    for record, judgement in said:
        parts.append(writer.steps([record.step], **columns(record)))
        if judgement.decision is not None:
            event = DecisionMade(decision=judgement.decision)
            parts.append(writer.events(event, step=record.step))
    return parts
