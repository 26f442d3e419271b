"""Has every single finite outlier withheld, early: for tests of what a withheld update leaves."""

import os

from trainer_hooks.step import controller

SETTINGS = {
    "VITALS_OUTLIER_WARM_UP": "10",
    "VITALS_LADDER_MAX_FIRSTS": "1000",
    "VITALS_LADDER_RECURRING_GROUPS": "1000",
    "VITALS_LADDER_MAX_WITHHELD": "1000",
}


def withhold_each_outlier() -> None:
    """Let no clip count as one, in this process, and set what `watch` reads. For spawned ranks."""
    controller._NO_CLIP = 0.0
    os.environ |= SETTINGS


def withhold_each_outlier_in(monkeypatch) -> None:
    """The same for one test."""
    monkeypatch.setattr(controller, "_NO_CLIP", 0.0)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
