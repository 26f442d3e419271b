"""Helpers for tests of anything built on Vitals: time by hand, series as text, replays."""

from trainvitals.testing.clock import ManualClock
from trainvitals.testing.faults import Fault, FaultPlan
from trainvitals.testing.series import decisions, judgements, replay, series

__all__ = [
    "Fault",
    "FaultPlan",
    "ManualClock",
    "decisions",
    "judgements",
    "replay",
    "series",
]
