"""One series whole, for programs: its numbers as they lie in memory."""

from trainvitals.errors import UsageError
from trainvitals.views import Branch, CurveReply
from vitals_collector.numbers.interface import Points
from vitals_collector.queries.metrics import unit_of

MAX_POINTS = 4_000_000
"""In one answer: 32 bytes each."""


def curve_reply(
    run_id: str, metric: str, source: str, branch: Branch, points: Points
) -> CurveReply:
    """Return the answer that holds all of the points.

    Raises:
        UsageError: they are too many for one answer.
    """
    if len(points) > MAX_POINTS:
        raise UsageError(
            f"{metric} has {len(points)} points; at most {MAX_POINTS} are given at once",
            hint="ask for fewer steps: from_step, to_step",
        )
    return CurveReply(
        run_id=run_id,
        metric=metric,
        source=source,
        unit=unit_of(metric),
        branch=branch,
        step=points.step.astype("<i8", copy=False).tobytes(),
        time_unix_ns=points.time_unix_ns.astype("<i8", copy=False).tobytes(),
        attempt=points.attempt.astype("<i8", copy=False).tobytes(),
        value=points.value.astype("<f8", copy=False).tobytes(),
    )
