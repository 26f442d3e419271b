"""Has every single finite outlier withheld, early: for tests of what a withheld update leaves."""

import os

SETTINGS = {
    "VITALS_OUTLIER_WARM_UP": "10",
    "VITALS_OUTLIER_FIRST": "4",
    "VITALS_OUTLIER_GRAD_NORM_RATIO": "10",
    "VITALS_OUTLIER_GRAD_NORM_FIRST": "2",
    "VITALS_LADDER_MAX_ROW": "1000",
    "VITALS_LADDER_MAX_WITHHELD": "1000",
}


def withhold_each_outlier() -> None:
    """Set what `watch` reads, in this process. For spawned ranks."""
    os.environ |= SETTINGS


def withhold_each_outlier_in(monkeypatch) -> None:
    """The same for one test."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
