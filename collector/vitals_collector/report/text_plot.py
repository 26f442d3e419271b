"""Draws a curve in a terminal: minimum and maximum of each column, and marks below the axis.

A spike of one step reaches its full height and a NaN is marked, regardless of the number of steps
per column. Marks are letters, so that nothing depends on color.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from trainvitals.units import humanize_count
from vitals_collector.report import curves

HEIGHT = 10
LABEL = 10
"""Characters left of the axis."""
NONFINITE = "x"
LEFT = "~"
"""Columns that only have discarded steps."""

BRAILLE = "\u2800"
"""The empty character; each dot is a bit."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row and column."""
_PLAIN = " '.:"
"""Without braille: the upper half, the lower half, both."""


def draw(
    curve: curves.PlottedCurve,
    marks: Sequence[curves.CurveMark],
    *,
    width: int = 100,
    has_braille: bool = True,
) -> list[str]:
    """Plot a run's curve for the terminal as lines of text, at most ``width`` wide."""
    num = max(10, width - LABEL - 2)
    across, down = (2, 4) if has_braille else (1, 2)
    span = curve.span
    lineage = curves.plot_columns(curve.series, span, num * across)
    discarded = curve.discarded_columns(num * across)
    everything = [column for branch in (lineage, *discarded) for column in branch.values()]
    scale = curves.ValueScale(everything)
    dots = _curve_dots(lineage, scale, HEIGHT * down)
    behind = {
        (row // down, at // across)
        for branch in discarded
        for row, at in _curve_dots(branch, scale, HEIGHT * down)
    }
    lines = [_plot_title(curve, scale)]
    shown = scale.ticks() if any(column.has_value for column in everything) else ()
    ticks = {round((HEIGHT - 1) * (1 - scale.part(value))): f"{value:.4g}" for value in shown}
    for row in range(HEIGHT):
        drawn = (_cell_character(dots, row, at, has_braille=has_braille) for at in range(num))
        cells = (
            LEFT if cell == " " and (row, at) in behind else cell for at, cell in enumerate(drawn)
        )
        lines.append(f"{ticks.get(row, ''):>{LABEL}} |{''.join(cells)}".rstrip())
    lines.append(f"{'step':>{LABEL}} +{_axis_line(span, num)}")
    pairs = [pair for branch in (lineage, *discarded) for pair in branch.items()]
    lost = {at // across for at, c in pairs if c.num_nonfinite}
    lines += _rows_below_axis(lost, marks, span, num, across)
    return lines


def legend(marks: Iterable[curves.CurveMark]) -> str:
    """Return the meaning and the number of the letters below a plot in the terminal."""
    counts = Counter(mark.kind for mark in marks)
    entries = [f"{NONFINITE} not finite", f"{LEFT} discarded by rollback"]
    entries += [
        f"{letter} {label} ({counts[kind]})"
        for kind, (letter, label) in curves.KINDS.items()
        if counts[kind]
    ]
    return f"{'':>{LABEL}}  {'   '.join(entries)}"


def _plot_title(curve: curves.PlottedCurve, scale: curves.ValueScale) -> str:
    """Return the line above a plot in the terminal: metric, steps, discarded ones."""
    series = curve.series
    steps = humanize_count(series.num_total, "step")
    text = f"{curve.name}{', logarithmic' if scale.is_log else ''}: {steps}"
    if series.num_nonfinite:
        text += f", {series.num_nonfinite} not finite"
    if curve.discarded is not None and curve.discarded.num_total:
        text += f"; {curve.discarded.num_total} discarded by rollbacks"
    return f"{'':>{LABEL}}  {text}"


def _curve_dots(
    branch: dict[int, curves.PlotColumn], scale: curves.ValueScale, height: int
) -> set[tuple[int, int]]:
    """Return (row, column) of each dot of a terminal plot: bars, and lines between them."""
    dots: set[tuple[int, int]] = set()
    before: tuple[int, int, int] | None = None
    for at in sorted(branch):
        column = branch[at]
        if column.has_value:
            high, low = (
                round((height - 1) * (1 - scale.part(v))) for v in (column.high, column.low)
            )
            dots |= {(row, at) for row in range(high, low + 1)}
            if before is not None:
                dots |= _connecting_dots(before, (at, high, low))
            before = (at, high, low)
        if column.num_nonfinite:
            before = None  # nothing is drawn across a NaN
    return dots


def _connecting_dots(a: tuple[int, int, int], b: tuple[int, int, int]) -> set[tuple[int, int]]:
    """Return the dots of a terminal plot that connect one bar's nearest end to the next."""
    (x, high, low), (to, to_high, to_low) = a, b
    start = min(max(high, to_high), low)
    end = min(max(to_high, start), to_low)
    start = min(max(high, end), low)
    dots: set[tuple[int, int]] = set()
    row = start
    for at in range(x + 1, to + 1):
        then = start + round((end - start) * (at - x) / (to - x))
        dots |= {(dot_row, at) for dot_row in range(min(row, then), max(row, then) + 1)}
        row = then
    return dots


def _cell_character(dots: set[tuple[int, int]], row: int, at: int, *, has_braille: bool) -> str:
    """Return the character of a terminal plot for some dots: Braille, or plain."""
    if not has_braille:
        return _PLAIN[((2 * row, at) in dots) + 2 * ((2 * row + 1, at) in dots)]
    bits = sum(
        bit
        for down, pair in enumerate(_DOTS)
        for across, bit in enumerate(pair)
        if (4 * row + down, 2 * at + across) in dots
    )
    return chr(ord(BRAILLE) + bits) if bits else " "


def _axis_line(span: tuple[int, int], num: int) -> str:
    """Return the first and last step below the axis of a terminal plot."""
    first, last = (str(step) for step in span)
    return first if span[0] == span[1] else f"{first}{last:>{num - len(first)}}"


def _rows_below_axis(
    lost: set[int], marks: Sequence[curves.CurveMark], span: tuple[int, int], num: int, across: int
) -> list[str]:
    """Return the rows below the axis of a terminal plot: non-finite values and decisions."""
    nonfinite = "".join(NONFINITE if at in lost else " " for at in range(num))
    decided = [" "] * num
    for kind in reversed(curves.KINDS):  # the most severe is drawn last
        for mark in marks:
            if mark.kind == kind and span[0] <= mark.step <= span[1]:
                decided[curves.plot_column_index(mark.step, span, num * across) // across] = (
                    curves.KINDS[kind][0]
                )
    rows = (("not finite", nonfinite), ("decided", "".join(decided)))
    return [f"{name:>{LABEL}} |{row.rstrip()}" for name, row in rows if row.strip()]
