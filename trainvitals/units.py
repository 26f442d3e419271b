"""Base units as text for people. Stored and exposed numbers stay in base units."""

import math
from collections.abc import Collection, Sequence

DATE_FORMAT = "%Y-%m-%d %H:%M:%SZ"
"""Format of a time in UTC, for ``strftime``."""
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SUFFIXES = ("seconds", "bytes", "watts", "joules", "celsius", "hertz")
"""Units at the end of a column's name that ``humanize`` writes after the value. A ratio stays a
number: 0.0001 is easier to compare than 0.01 %."""
_DECIMAL = ("", "k", "M", "G", "T", "P")


def humanize(value: float | None, unit: str = "") -> str:
    """Return ``value`` with a readable unit; missing is a dash."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if unit == "bytes":
        return humanize_bytes(value)
    if unit == "seconds":
        return humanize_seconds(value)
    if unit == "ratio":
        return f"{value * 100:.3g} %"
    if unit == "watts":
        return f"{value:.4g} W"
    if unit == "joules":
        return f"{_format_scaled(value)}J"
    if unit == "celsius":
        return f"{value:.3g} °C"
    if unit == "hertz":
        return f"{_format_scaled(value)}Hz"
    if unit == "tokens":
        return _format_scaled(value).rstrip()
    return f"{value:.4g}"


def split_unit(column: str) -> tuple[str, str]:
    """Return a metric's name without its unit, as text, and the unit of its values."""
    name, _, unit = column.rpartition("_")
    if unit not in _SUFFIXES:
        name, unit = column, ""
    return name.replace("_", " "), unit


def humanize_count(number: int, singular: str, plural: str = "") -> str:
    """Return a count for messages: ``1 step`` or ``1,024 steps``; the plural adds ``s``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def name_ranks(ranks: Collection[int], most: int = 8) -> str:
    """Return ``rank 3`` or ``ranks 0, 2``; the number of further ones above ``most``."""
    shown = ", ".join(map(str, sorted(ranks)[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


def humanize_bytes(value: float) -> str:
    """Return a metric's bytes in binary units: ``1.5 GiB``."""
    return _format_scaled(value, 1024, _BINARY)


def humanize_seconds(value: float) -> str:
    """Return a duration: ``850 us``, ``12.3 s``, ``3 min 20 s``, ``2 d 4 h``."""
    size = abs(value)
    if size and size < 0.9995e-3:  # 1e-3 in three digits
        return f"{value * 1e6:.3g} us"
    if size < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if size < 60:
        return f"{value:.3g} s"
    sign, whole = "-" if value < 0 else "", round(size)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min"))):
        if whole >= large:
            return f"{sign}{whole // large} {names[0]} {whole % large // small} {names[1]}"
    return f"{sign}{whole // 60} min {whole % 60} s"


def _format_scaled(value: float, base: int = 1000, names: Sequence[str] = _DECIMAL) -> str:
    """Return a metric's value with four digits and a decimal prefix."""
    size, index = float(value), 0
    while abs(size) >= base and index < len(names) - 1:
        size, index = size / base, index + 1
    return f"{size:.4g} {names[index]}"
