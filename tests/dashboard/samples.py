"""Runs made up from views: what a collector would answer, without one."""

import math
import random
from dataclasses import dataclass, field

from msgspec.structs import replace

from trainvitals.records import Decision, RunInfo
from trainvitals.views import (
    AlertView,
    AnnotationView,
    AttemptView,
    CellsReply,
    CheckpointView,
    CommandView,
    DecisionView,
    EventView,
    FindingView,
    ForecastView,
    GoodputView,
    IncidentView,
    MoverView,
    NonFiniteMark,
    RunDetail,
    RunSummary,
    SeriesReply,
    SourceView,
    StacksView,
)

NOW_NS = 1_790_000_000_000_000_000
FIRST, SECOND = 1_790_000_000_000_001, 1_790_000_000_000_002
NAN_STEP, STORM, FORK, LAST = 120, 260, 230, 420
HOSTILE = '<script>document.title="owned"</script><img src=x onerror=alert(1)> ![x](http://e.x/i)'


def run_id(number: int) -> str:
    """A ULID that ends in the number."""
    return f"01K{number:023d}"


@dataclass
class SampleRun:
    """One run's answers."""

    summary: RunSummary
    detail: RunDetail
    decisions: list[DecisionView]
    checkpoints: list[CheckpointView]
    series: dict[tuple[str, str, str], SeriesReply] = field(default_factory=dict)
    annotations: list[AnnotationView] = field(default_factory=list)
    cells: dict[str, CellsReply] = field(default_factory=dict)
    movers: list[MoverView] = field(default_factory=list)
    incidents: list[IncidentView] = field(default_factory=list)
    findings: list[FindingView] = field(default_factory=list)
    events: list[EventView] = field(default_factory=list)
    commands: list[CommandView] = field(default_factory=list)
    stacks: list[StacksView] = field(default_factory=list)
    goodput: GoodputView | None = None
    forecast: ForecastView | None = None

    def __post_init__(self) -> None:
        if self.goodput is None:
            self.goodput = goodput(self.summary)
        if self.forecast is None:
            self.forecast = forecast(self.summary)


def goodput(run: RunSummary) -> GoodputView:
    """Return where ten minutes went, of which eight were productive."""
    begin = run.started_unix_ns
    return GoodputView(
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        begin_unix_ns=begin,
        end_unix_ns=begin + 600 * 10**9,
        nanoseconds={"productive": 480 * 10**9, "down": 120 * 10**9},
        ratio=0.8,
        steps=420,
        lost_steps=31,
        num_failures=1,
        mttf_seconds=480.0,
        gpu_hours=2.0,
        money=5.0,
        notes=("Nothing is known of rank 7.",),
    )


def forecast(run: RunSummary) -> ForecastView:
    """Return that of a run of 1,000 steps, which lies behind another."""
    return ForecastView(
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        asked_unix_ns=NOW_NS,
        last_step=LAST,
        total_steps=1_000,
        finish_unix_ns=NOW_NS + 3_600 * 10**9,
        finish_low_unix_ns=NOW_NS + 3_000 * 10**9,
        finish_high_unix_ns=NOW_NS + 4_800 * 10**9,
        seconds_per_step=6.2,
        step_ratio=0.8,
        final_loss=2.12,
        final_loss_low=2.02,
        final_loss_high=2.18,
        against="base",
        behind=2.1e6,
        behind_steps=210.0,
    )


def summary(number: int, *, name: str = "", now_ns: int = NOW_NS, **changes: object) -> RunSummary:
    """One line of the overview."""
    values: dict[str, object] = {
        "run_id": run_id(number),
        "name": name or f"bytes-gpt-{number}",
        "project": "demo",
        "user": "ada",
        "tags": ("ddp", "guarded"),
        "mode": "heal",
        "state": "running",
        "health": "healthy",
        "world_size": 2,
        "started_unix_ns": now_ns - 600_000_000_000 - number * 1_000_000_000,
        "last_seen_unix_ns": now_ns - 1_000_000_000,
        "last_step": LAST,
        "loss": 2.41,
        "grad_norm": 0.83,
        "num_skips": 4,
        "num_rollbacks": 1,
        "num_attempts": 2,
        "num_firing_alerts": 1,
        "last_decision": "rollback at step 262: three skips in 20 steps",
    }
    return RunSummary(**(values | changes))  # type: ignore[arg-type]


def decision(ledger_seq: int, action: str, step: int, reason: str, **more: object) -> DecisionView:
    """One ledger entry."""
    made = Decision(
        ledger_seq=ledger_seq,
        action=action,  # type: ignore[arg-type]
        step=step,
        decided_at_step=step + 1,
        attempt=FIRST,
        reason=reason,
        rule="skip.nonfinite" if action == "skip_step" else "rollback.storm",
        cause="data",
        cost_steps=1 if action == "skip_step" else 32,
        **more,  # type: ignore[arg-type]
    )
    return DecisionView(run_id=run_id(1), time_unix_ns=NOW_NS + step * 10**9, decision=made)


def series(
    metric: str,
    source: str,
    values: list[float | None],
    *,
    steps: list[int] | None = None,
    attempt: int = SECOND,
    unit: str = "",
    branch: str = "lineage",
    nonfinite: tuple[NonFiniteMark, ...] = (),
    total: int = 0,
) -> SeriesReply:
    """One curve."""
    at = list(range(len(values))) if steps is None else steps
    return SeriesReply(
        run_id=run_id(1),
        metric=metric,
        source=source,
        unit=unit,
        branch=branch,  # type: ignore[arg-type]
        num_total=total or len(values),
        step=tuple(at),
        time_unix_ns=tuple(NOW_NS - (len(at) - i) * 500_000_000 for i in range(len(at))),
        attempt=tuple(FIRST if step < FORK else attempt for step in at),
        value=tuple(values),
        nonfinite=nonfinite,
    )


def diverged_run() -> SampleRun:
    """The sample run as it would be had its last loss been NaN, as a decision saw it."""
    run = sample_run(name="diverged")
    broken = {"loss": math.nan, "grad_norm": math.inf, "health": "critical"}
    run.summary = replace(run.summary, **broken)
    run.detail = replace(run.detail, summary=run.summary)
    made = decision(9, "skip_step", LAST, "loss is nan", value=math.nan)
    run.decisions.append(made)
    nan = NonFiniteMark(step=LAST, attempt=SECOND, kind="nan")
    key = ("steps.loss", "rank:0", "lineage")
    run.series[key] = replace(run.series[key], nonfinite=(*run.series[key].nonfinite, nan))
    return run


def sample_run(*, name: str = "", with_gpu: bool = False, now_ns: int = NOW_NS) -> SampleRun:
    """A run with a NaN step, a poisoned window that ended in a rollback, and no GPU."""
    rng = random.Random(7)
    loss: list[float | None] = [
        2.3 + 3.2 * math.exp(-s / 90) + rng.gauss(0, 0.05) for s in range(LAST)
    ]
    norm: list[float | None] = [0.7 + math.exp(-s / 40) + rng.gauss(0, 0.06) for s in range(LAST)]
    loss[NAN_STEP] = norm[NAN_STEP] = None
    for step, jump in ((180, 1.6), (181, 2.2)):
        loss[step] = (loss[step] or 0) + jump
        norm[step] = 21.0 + step / 40
    nan = (NonFiniteMark(step=NAN_STEP, attempt=FIRST, kind="nan"),)
    left = [2.6 + (s - FORK) ** 1.25 * 0.02 + rng.gauss(0, 0.08) for s in range(FORK, STORM + 4)]
    steps = list(range(FORK, STORM + 4))
    rank = "rank:0"
    found: dict[tuple[str, str, str], SeriesReply] = {
        ("steps.loss", rank, "lineage"): series("steps.loss", rank, loss, nonfinite=nan),
        ("steps.loss", rank, "discarded"): series(
            "steps.loss", rank, list(left), steps=steps, attempt=FIRST, branch="discarded"
        ),
        ("steps.grad_norm", rank, "lineage"): series("steps.grad_norm", rank, norm, nonfinite=nan),
        ("steps.grad_norm", rank, "discarded"): series(
            "steps.grad_norm", rank, [2 * v for v in left], steps=steps, branch="discarded"
        ),
    }

    def add(metric: str, values: list[float | None], source: str = rank, unit: str = "") -> None:
        found[metric, source, "lineage"] = series(metric, source, values, unit=unit)

    smooth = [2.3 + 3.2 * math.exp(-s / 90) for s in range(LAST)]
    add("steps.loss_limit", [None if s < 30 else v * 1.25 + 0.3 for s, v in enumerate(smooth)])
    add("steps.grad_norm_limit", [None if s < 30 else 3.0 for s in range(LAST)])
    add(
        "steps.learning_rate",
        [3e-3 * min(1, s / 40) * (0.5 if s > FORK else 1) for s in range(LAST)],
    )
    add("steps.tokens_per_second", [rng.gauss(41_000, 900) for _ in range(LAST)], unit="tokens")
    for number in (0, 1):
        noisy: list[float | None] = [None if v is None else v + rng.gauss(0, 0.08) for v in loss]
        source = f"rank:{number}"
        add("steps.rank_loss", noisy, source)
        add(
            "steps.step_duration_seconds", [rng.gauss(0.05, 0.003) for _ in loss], source, "seconds"
        )
        add(
            "steps.data_wait_seconds",
            [abs(rng.gauss(0.002, 0.001)) for _ in loss],
            source,
            "seconds",
        )
    add(
        "node.cpu_ratio",
        [min(1.0, abs(rng.gauss(0.9, 0.05))) for _ in range(200)],
        "node:n1",
        "ratio",
    )
    add("node.memory_used_bytes", [6.1e9 + s * 2e6 for s in range(200)], "node:n1", "bytes")
    sources = ["rank:0", "rank:1", "node:n1"]
    if with_gpu:
        add("gpu.utilization_ratio", [0.97] * 200, "gpu:GPU-1", "ratio")
        add("gpu.power_watts", [rng.gauss(640, 20) for _ in range(200)], "gpu:GPU-1", "watts")
        add("steps.mfu_ratio", [rng.gauss(0.41, 0.01) for _ in range(LAST)], unit="ratio")
        sources.append("gpu:GPU-1")
    line = summary(1, name=name, now_ns=now_ns)
    detail = RunDetail(
        summary=line,
        info=RunInfo(name=line.name, num_params=290_000, world_size=2),
        attempts=(
            AttemptView(
                id=FIRST,
                ordinal=1,
                parent=None,
                fork_step=0,
                started_unix_ns=NOW_NS,
                last_step=STORM + 3,
                reason="start",
            ),
            AttemptView(
                id=SECOND,
                ordinal=2,
                parent=FIRST,
                fork_step=FORK,
                started_unix_ns=NOW_NS,
                last_step=LAST,
                reason="rollback: 3 skips in 20 steps",
            ),
        ),
        sources=tuple(
            SourceView(
                source=s,
                incarnation=f"{i:016x}",
                node="n1",
                pid=100 + i,
                started_unix_ns=NOW_NS,
                last_seen_unix_ns=NOW_NS,
                num_rows=LAST,
                num_lost_rows=0,
                streams=("steps",),
            )
            for i, s in enumerate(sources)
        ),
        metrics=tuple(sorted({metric for metric, _, _ in found})),
    )
    return SampleRun(
        summary=line,
        detail=detail,
        decisions=[
            decision(1, "skip_step", NAN_STEP, "gradients of rank 1 are NaN", rank=1),
            decision(2, "skip_step", 180, "loss 4.3 is above its limit 3.2", value=4.3, limit=3.2),
            decision(3, "skip_step", 181, "loss 4.9 is above its limit 3.2", value=4.9, limit=3.2),
            decision(
                4,
                "rollback",
                STORM + 2,
                "3 skips in 20 steps; back to a healthy checkpoint",
                rollback_to_step=FORK,
                checkpoint_id="step-000230-ab12",
                new_attempt=SECOND,
                skip_batches=50,
                budget_left=2,
            ),
        ],
        checkpoints=[
            CheckpointView(
                checkpoint_id=f"step-{s:06d}-ab12",
                step=s,
                attempt=FIRST,
                state="healthy" if s < 400 else "candidate",
                where="memory",
                num_bytes=3_500_000,
                detail="",
                time_unix_ns=NOW_NS + s,
            )
            for s in (0, 230, 410)
        ],
        series=found,
    )


def alert(number: int = 1, **changes: object) -> AlertView:
    """One alert."""
    values: dict[str, object] = {
        "fingerprint": f"{number:016x}",
        "name": "rolled_back",
        "run_id": run_id(1),
        "severity": "notify",
        "state": "firing",
        "summary": "Rolled back from step 262 to step 230: 3 skips in 20 steps.",
        "labels": {},
        "step": 262,
        "started_unix_ns": NOW_NS - 90_000_000_000,
        "updated_unix_ns": NOW_NS - number,
    }
    return AlertView(**(values | changes))  # type: ignore[arg-type]
