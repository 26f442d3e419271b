"""What a collector answers about the past of the sample run: maps, movers, incidents, events."""

import math
import random

import msgspec

from tests.dashboard import samples
from tests.dashboard.samples import LAST, NOW_NS, SampleRun
from trainvitals.records import BatchNoted, Finding
from trainvitals.views import (
    AnnotationView,
    CellsReply,
    EventView,
    FindingView,
    IncidentView,
    LostWork,
    MoverView,
    SourceView,
    StepData,
    TimelineEntry,
    VerdictView,
)

STEPS = tuple(range(0, LAST, 10))
LAYERS = (*(f"blocks.{n}.attn.weight" for n in range(12)), "embed.weight", "head.weight")
RANKS = tuple(f"rank:{n}" for n in range(8))
BAD_LAYER, BAD_RANK, BAD_COLUMN = 7, 3, 18
INCIDENT = "1790000000000001-178"


def with_look_back(sample: SampleRun) -> SampleRun:
    """Add what is known of the run's past: a layer that explodes, a slow rank, an incident."""
    rng = random.Random(3)
    for metric, base in (("layers.grad_norm", 0.4), ("layers.update_ratio", 1e-3)):
        sample.cells[metric] = _layers(metric, base, rng)
    sample.cells["steps.step_duration_seconds"] = _ranks(rng)
    sample.cells["steps.rank_loss"] = _ranks(rng, metric="steps.rank_loss", unit="", base=2.4)
    sample.movers = [
        MoverView(
            row=LAYERS[BAD_LAYER], metric="grad_norm", before=0.4, peak=None, peak_step=180,
            score=1e300,
        ),
        MoverView(
            row="rank:3", metric="rank_loss", before=2.4, peak=9.0, peak_step=181, score=41.2
        ),
    ]  # fmt: skip
    found = Finding(
        kind="straggler", level="advisory", step=181, detector="straggler", rank=BAD_RANK,
        reason="rank 3 on node-b takes 38 % longer than the others", value=0.07, limit=0.055,
    )  # fmt: skip
    sample.findings = [
        FindingView(run_id=sample.summary.run_id, time_unix_ns=NOW_NS, finding=found)
    ]
    sample.events = [
        EventView(
            time_unix_ns=NOW_NS, source="gpu:GPU-3", step=-1, attempt=0, kind="Note",
            text="GPU-3 throttled: power brake",
        )
    ]  # fmt: skip
    sample.annotations = [
        *sample.annotations,
        AnnotationView(step=100, time_unix_ns=NOW_NS, text="longer context from here", by=""),
    ]
    sample.incidents = [incident(sample)]
    sample.detail = msgspec.structs.replace(
        sample.detail,
        sources=tuple(_source(n) for n in range(8)),
        metrics=tuple(sorted({*sample.detail.metrics, *(f"layers.{name}" for name in LAYERS)})),
    )
    return sample


def incident(sample: SampleRun) -> IncidentView:
    """The two skips at step 180 and the rollback after them, as one story."""
    return IncidentView(
        incident_id=INCIDENT,
        run_id=sample.summary.run_id,
        title="Loss spike at step 180, rolled back to step 230",
        severity="notify",
        is_open=False,
        onset_step=178,
        last_step=262,
        started_unix_ns=NOW_NS - 300_000_000_000,
        ended_unix_ns=NOW_NS - 200_000_000_000,
        verdict=VerdictView(
            incident_id=INCIDENT,
            state="Running at step 420. Resolved: 158 healthy steps since step 262.",
            cause=f"Rank 3's loss reached 4.9 (limit 3.2) at steps 180 to 181. {samples.HOSTILE}",
            action="Skipped 2 updates (steps 180 to 181). Rolled back to step 230.",
            cost="Lost work: 34 steps (68 k tokens, 17 s x 2 ranks); 50 batches dropped.",
            before="First time in this run. Also in 1 of 4 other runs: elder.",
            next="Nothing to do.",
            commands=(f"vitals postmortem {sample.summary.run_id} --incident {INCIDENT}",),
            lost=LostWork(steps=34, batches=50, tokens=68_000, seconds=17.0),
            timeline=(
                TimelineEntry(time_unix_ns=NOW_NS, step=180, text="Detected: a spike"),
                TimelineEntry(time_unix_ns=NOW_NS, step=262, text="Rolled back to step 230."),
            ),
        ),
        story=(
            "At step 178 the gradient norm of blocks.7.attn.weight left its range, on rank 3.",
            "Two steps were skipped; at step 262 the run went back to step 230.",
            samples.HOSTILE,
        ),
        cost_steps=34,
        cost_seconds=17.0,
        decisions=tuple(sample.decisions[1:]),
        findings=tuple(sample.findings),
        alerts=(samples.alert(),),
        events=tuple(sample.events),
        data=(
            StepData(
                source="rank:3",
                attempt=samples.FIRST,
                batch=BatchNoted(
                    epoch=0, first_batch=180, num_batches=1, sample_ids=(17, "shard-4/9"),
                    num_samples=8,
                ),
            ),
        ),
    )  # fmt: skip


def proposed(sample: SampleRun, *, action: str = "rollback", mode: str = "heal") -> SampleRun:
    """Make the last decision one that was only proposed, of a run in a mode."""
    last = sample.decisions[-1]
    made = msgspec.structs.replace(last.decision, action=action, acted=False, mode="observe")
    sample.decisions[-1] = msgspec.structs.replace(last, decision=made, hindsight="needed")
    sample.summary = msgspec.structs.replace(sample.summary, mode=mode)
    sample.detail = msgspec.structs.replace(sample.detail, summary=sample.summary)
    return sample


def _layers(metric: str, base: float, rng: random.Random) -> CellsReply:
    value = [
        [base * (1 + n / 4) * math.exp(rng.gauss(0, 0.15)) for _ in STEPS]
        for n in range(len(LAYERS))
    ]
    value[BAD_LAYER][BAD_COLUMN - 1] *= 40
    cells: list[list[float | None]] = [list(row) for row in value]
    cells[BAD_LAYER][BAD_COLUMN] = None
    cells[0][2] = None
    return _reply(metric, "", LAYERS, cells, ((BAD_LAYER, BAD_COLUMN),))


def _ranks(
    rng: random.Random,
    *,
    metric: str = "steps.step_duration_seconds",
    unit: str = "seconds",
    base: float = 0.05,
) -> CellsReply:
    cells: list[list[float | None]] = [
        [base * (1.38 if n == BAD_RANK else 1.0) * (1 + rng.gauss(0, 0.02)) for _ in STEPS]
        for n in range(len(RANKS))
    ]
    return _reply(metric, unit, RANKS, cells, ())


def _reply(
    metric: str,
    unit: str,
    rows: tuple[str, ...],
    cells: list[list[float | None]],
    nonfinite: tuple[tuple[int, int], ...],
) -> CellsReply:
    return CellsReply(
        run_id=samples.run_id(1),
        metric=metric,
        unit=unit,
        rows=rows,
        num_rows=len(rows) + 3,
        step=STEPS,
        value=tuple(tuple(row) for row in cells),
        nonfinite=nonfinite,
    )


def _source(number: int) -> SourceView:
    return SourceView(
        source=f"rank:{number}",
        incarnation=f"{number:016x}",
        node="node-a" if number < 2 else "node-b",
        pid=100 + number,
        started_unix_ns=NOW_NS,
        last_seen_unix_ns=NOW_NS,
        num_rows=LAST,
        num_lost_rows=0,
        streams=("steps",),
    )
