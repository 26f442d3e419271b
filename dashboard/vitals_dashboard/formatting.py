"""Formats numbers, ages and external text for display. Reads no clock."""

import math
import unicodedata

from trainvitals.units import humanize_count

SECOND_NS = 1_000_000_000
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
count = humanize_count


def plain(text: str, limit: int = 120) -> str:
    """Return text as one safe line on the dashboard, of at most ``limit`` characters."""
    shortened = text[: limit * 4]
    if not shortened.isprintable():
        shortened = "".join(
            " " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c
            for c in shortened
            if unicodedata.category(c) not in ("Cf", "Cs", "Co", "Cn")
        )
    shortened = " ".join(shortened.split())
    return shortened if len(shortened) <= limit else shortened[: limit - 1] + ELLIPSIS


def sentence(text: str, limit: int = 120) -> str:
    """Return a sentence as one safe line, with code in quotes: ``st.text`` marks none."""
    return plain(text, limit).replace("`", "'")


def run_label(name: str, run_id: str, limit: int = 80) -> str:
    """Return a run's name as the dashboard shows it, or its id if it has none."""
    return plain(name, limit) or run_id


def run_choice(name: str, run_id: str) -> str:
    """Return a run's text in a choice; constant, because a browser identifies its choice by it."""
    return f"{run_label(name, run_id, 60)}  ({run_id[-6:]})"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with few digits, as on the dashboard; a dash if unmeasured."""
    if value is None:
        return "\N{EN DASH}"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def rate(value: float | None) -> str:
    """Return a rate per second, as 4,750, for the dashboard; small ones as ``number``."""
    return f"{value:,.0f}" if value is not None and 1e2 <= value < 1e9 else number(value, 3)


def share(ratio: float | None) -> str:
    """Return a ratio in percent for the dashboard; a dash if it is unknown."""
    return "\N{EN DASH}" if ratio is None else f"{100 * ratio:.1f} %"


def age(since_unix_ns: int, now_unix_ns: int) -> str:
    """Return the time since an event for the dashboard; a future one counts as now."""
    if since_unix_ns <= 0:
        return "\N{EN DASH}"
    seconds = max(0, now_unix_ns - since_unix_ns) / SECOND_NS
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def size(num_bytes: int) -> str:
    """Return bytes with a readable unit for the dashboard."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
