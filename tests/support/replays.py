"""Recorded runs that are judged again."""

import math

from tests.collector.alerting import Place
from tests.collector.rows import RUN
from trainvitals.policy import JudgeConfig
from trainvitals.records import (
    StepRecord,
)
from vitals_collector.report.replay import Replay, replay


def replayed(place: Place, config: JudgeConfig | None = None) -> Replay:
    return replay(place.store, RUN, config=config)


def columns(record: StepRecord) -> dict[str, object]:
    """Return the row's columns as rank 0 writes them."""
    loss, norm = record.loss, record.grad_norm
    verdict = (
        1 * (loss is not None and not math.isfinite(loss))
        + 2 * (norm is not None and not math.isfinite(norm))
        + 16 * record.overflow
        + 32 * bool(record.failed_ranks)
        + 64 * record.withheld
        + 128 * record.clips
    )
    ranks = record.nonfinite_ranks
    return {
        "loss": loss,
        "loss_max": record.loss_max,
        "grad_norm": norm,
        "loss_limit": record.loss_limit,
        "grad_norm_limit": record.grad_norm_limit,
        "learning_rate": record.learning_rate,
        "verdict": verdict,
        "skipped": int(record.skipped),
        "culprit_rank": ranks[0] if len(ranks) == 1 else -1,
        "nonfinite_params": record.nonfinite_params,
        "rank_loss": 1.0,
    }


COURSE = "loss 3..2x60 nan 2x10 40 40 2x30; grad_norm 1x60 1 1x10 50 50 1x30; loss_max 2x103"
