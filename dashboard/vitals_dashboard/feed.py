"""The charts of a page in the browser: its points, and updates with new ones.

One component draws all charts of a page (``charts/browser/chart.js``) and keeps their points. A
``ChartFeed`` records for one browser session what was sent, queries the collector for later rows,
and sends those. The browser requests messages that it missed: each names the one before it.
"""

import hashlib
import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import streamlit as st
from msgspec import structs

from trainvitals.views import RunDetail, SeriesReply, SeriesRequest
from vitals_dashboard.charts import Chart, ChartLine, Role
from vitals_dashboard.charts.lines import ChartCurve
from vitals_dashboard.charts.marks import NON_FINITE
from vitals_dashboard.components import register_component
from vitals_dashboard.source import DataSource, series_of
from vitals_dashboard.theme import DARK, LIGHT

NUM_RECENT = 64
"""Rows of a series that are queried again: some of these may have arrived late or changed."""
MARGIN_STEPS = 1_000
"""Margin after the run's last step, because the run continues during the query."""
MAX_POINTS = 60_000
"""Points a page may carry to the browser; beyond it whole charts are left out, and counted."""
_NO_STEPS = ("gpu.", "node.", "process.")

Wire = dict[str, Any]
Row = tuple[int, int, int, float | None]
Zoomed = Callable[[str, tuple[float, float] | None], None]
"""Called when a user has selected a range: its axis and its ends; None: the whole run."""


class SentMark(NamedTuple):
    """A mark in the browser."""

    kind: str
    place: float
    text: str
    num: int


@dataclass(slots=True, kw_only=True)
class _Sent:
    """Points of one series in the browser."""

    reply: SeriesReply
    """As it was sent first; complete for a discarded series."""
    recent: deque[Row]
    """Its last rows: step, time, attempt, value."""
    num_hidden: int
    """Stored rows after the first of those that are not among them; no value is finite."""
    num_total: int
    num_nonfinite: int


@dataclass(slots=True, kw_only=True)
class ChartFeed:
    """Points that one browser session has of the charts of a page."""

    key: str = ""
    of: object = None
    """Subject and style of the charts: if that changes, everything is sent again."""
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    number: int = 0
    """Number of the last message; 0: none was sent."""
    series: dict[SeriesRequest, _Sent] = field(default_factory=dict)
    """By request, for any run; a series without rows is not in it."""
    seen: dict[SeriesRequest, int] = field(default_factory=dict)
    """The run's last report when each series was queried: there are new rows only after it."""
    layout: object = None
    digest: bytes = b""
    """Digest of the last complete message."""
    last_step: int = -1
    """Last step of any series."""
    marks: dict[SentMark, int] = field(default_factory=dict)
    """In which charts each mark is, a bit each."""

    def reset(self) -> None:
        """Clear the record of what the browser has: the next message contains whole charts."""
        self.number, self.layout, self.digest = 0, None, b""
        self.series.clear()
        self.seen.clear()
        self.marks.clear()

    def query_lines(
        self,
        source: DataSource,
        detail: RunDetail,
        requests: Sequence[tuple[str, SeriesRequest, Role]],
    ) -> list[ChartLine | None]:
        """Query the series of a page's charts: only rows newer than those in the browser.

        ``requests`` has for each its name, the request and the role.
        """
        seen = detail.summary.last_seen_unix_ns
        due = {
            request: self._narrow_request(request, role, detail.summary.last_step)
            for _, request, role in requests
            if self.seen.get(_drop_request_range(request)) != seen
        }
        replies = dict(zip(due, series_of(source, detail, [*due.values()]), strict=True))
        self.seen |= dict.fromkeys(map(_drop_request_range, due), seen)
        return [self._build_line(*choice, replies.get(choice[1])) for choice in requests]

    def _narrow_request(self, request: SeriesRequest, role: Role, last_step: int) -> SeriesRequest:
        """Narrow a series request to rows that the browser lacks; discarded attempts are whole."""
        sent = self.series.get(_drop_request_range(request))
        if sent is None or role == "discarded":
            return request
        if request.from_step is not None:  # the window has moved on
            while sent.recent and sent.recent[0][0] < request.from_step:
                sent.recent.popleft()
        if not sent.recent:
            return request
        step, time, _, _ = sent.recent[0]
        if request.metric.startswith(_NO_STEPS):
            return structs.replace(request, from_time_unix_ns=time)
        if request.metric.startswith("steps.") and request.to_step is None:
            # With both ends the span is known to be short, and no overview of the run is read.
            request = structs.replace(request, to_step=max(step, last_step) + MARGIN_STEPS)
        return structs.replace(request, from_step=step)

    def _build_line(
        self, name: str, request: SeriesRequest, role: Role, reply: SeriesReply | None
    ) -> ChartLine | None:
        """Return a chart's line with only the points that the browser lacks."""
        sent = self.series.get(_drop_request_range(request))
        rows = _point_rows(reply)
        self.last_step = max([self.last_step, *(row[0] for row in rows[-1:])])
        if reply is not None and (sent is None or (role == "discarded" and reply != sent.reply)):
            recent, num_hidden = _rows_to_requery(reply, rows)
            self.series[_drop_request_range(request)] = _Sent(
                reply=reply,
                recent=recent,
                num_hidden=num_hidden,
                num_total=reply.num_total,
                num_nonfinite=reply.num_nonfinite,
            )
            return ChartLine(name=name, reply=reply, role=role)
        if sent is None:
            return None
        if role == "discarded":
            return ChartLine(name=name, reply=sent.reply, role=role, num_replaced=0)
        if reply is None:
            return ChartLine(
                name=name, reply=_build_series_reply(sent, None, ()), role=role, num_replaced=0
            )
        pairs = zip(sent.recent, rows, strict=False)
        num_same = next(
            (i for i, (old, new) in enumerate(pairs) if not _is_same_row(old, new)), None
        )
        if num_same is None:
            num_same = min(len(sent.recent), len(rows))
        before, fresh = list(sent.recent), rows[num_same:]
        num_bad = sum(row[3] is None for row in before)
        sent.num_total += reply.num_total - len(before) - sent.num_hidden
        sent.num_nonfinite += reply.num_nonfinite - num_bad - sent.num_hidden
        sent.recent, sent.num_hidden = _rows_to_requery(reply, rows)
        return ChartLine(
            name=name,
            reply=_build_series_reply(sent, reply, fresh),
            role=role,
            num_replaced=len(before) - num_same,
        )

    def send_charts(self, charts: Sequence[Chart], *, zoomed: Zoomed | None = None) -> int | None:
        """Send the charts, or their changes, to the browser; return how many did not fit.

        None: the browser lacks the base of these changes, so the charts have to be made again
        completely.
        """
        if not charts and not self.number:
            return 0
        drawn_charts, num_left_out = _charts_within_limit(charts)
        layout = [_layout(chart) for chart in drawn_charts]
        is_whole = all(c.num_replaced is None for chart in drawn_charts for c in chart.curves)
        if not is_whole and layout != self.layout:
            return None
        _mount_component(
            self,
            self._full_message(drawn_charts) if is_whole else self._changes_message(drawn_charts),
            zoomed,
        )
        self.layout = layout
        return num_left_out

    def _full_message(self, charts: Sequence[Chart]) -> Wire:
        """Return the message to the browser with whole charts; without them if unchanged."""
        self.marks = _charts_by_mark(charts)
        looks = {mark.look.word: mark.look for chart in charts for mark in chart.marks}
        message: Wire = {
            "base": 0,
            "charts": [
                _layout(chart)
                | {
                    "note": chart.note,
                    "ends": chart.ends,
                    "lines": [_whole_curve(curve) for curve in chart.curves],
                }
                for chart in charts
            ],
            "kinds": {word: asdict(look) for word, look in looks.items()},
            "marks": [_wire_mark(mark, places) for mark, places in self.marks.items()],
            "look": {"light": LIGHT.lines, "dark": DARK.lines},
        }
        digest = hashlib.sha256(msgspec.json.encode(message)).digest()
        if self.number and digest == self.digest:
            return {"base": self.number}
        self.digest = digest
        self.number += 1
        return message

    def _changes_message(self, charts: Sequence[Chart]) -> Wire:
        """Return the message to the browser with the changes of its charts; it may be empty."""
        xs: list[list[float]] = []
        lines = []
        for i, chart in enumerate(charts):
            for j, curve in enumerate(chart.curves):
                if not curve.x and not curve.num_replaced:
                    continue
                x = [_integer_if_whole(x_value) for x_value in curve.x]
                if x not in xs:
                    xs.append(x)
                y = [_round_to_float32(value) for value in curve.y]
                totals = [curve.num_total, curve.num_nonfinite]
                lines.append([i, j, curve.num_replaced, xs.index(x), y, *totals])
        marks = _charts_by_mark(charts)
        bad = {
            mark: sent_mark
            for mark, sent_mark in self.marks.items()
            if mark.kind == NON_FINITE.word
        }
        marks = bad | marks
        removed = [i for i, mark in enumerate(self.marks) if marks.get(mark) != self.marks[mark]]
        changed = [mark for mark, places in marks.items() if self.marks.get(mark) != places]
        come = [_wire_mark(mark, marks[mark]) for mark in changed]
        kinds_sent = {mark.kind for mark in self.marks}
        looks = {mark.look.word: mark.look for chart in charts for mark in chart.marks}
        sent_mark = [mark for mark in self.marks if marks.get(mark) == self.marks[mark]]
        self.marks = {mark: marks[mark] for mark in [*sent_mark, *changed]}
        ends = [chart.ends for chart in charts]
        message: Wire = {"base": self.number}
        if lines or removed or come:
            self.number += 1
            kinds = {word: asdict(look) for word, look in looks.items() if word not in kinds_sent}
            parts = {"xs": xs, "lines": lines, "gone": removed, "marks": come, "kinds": kinds}
            message |= {name: part for name, part in parts.items() if part}
            message["ends"] = ends if len({*ends}) > 1 else ends[:1]
        return message


def load_charts() -> None:
    """Make the browser load the chart program, while the server queries the data."""
    with st.container(key="charts_loaded"):
        register_component("chart")(key="charts_program", data="", height="content")


def draw_charts(
    key: str,
    make: Callable[[ChartFeed], Sequence[Chart]],
    *,
    of: object = None,
    zoomed: Zoomed | None = None,
) -> int:
    """Draw the charts of a page in one component; return how many did not fit.

    Args:
        key: key of the component: a page may have several, each with its own cursor and range.
        make: returns the charts. Lines from the feed contain only points that the browser lacks;
            others are sent completely whenever they change.
        of: subject and style of the charts: for another value all charts are sent again.
        zoomed: called when a user has selected or reset a range; without it the range stays in the
            browser.
    """
    feed_key = f"feed_{key}"
    feed = st.session_state.get(feed_key)
    if feed is None or feed.of != of:
        feed = st.session_state[feed_key] = ChartFeed(key=key, of=of)
    num_left_out = feed.send_charts(make(feed), zoomed=zoomed)
    if num_left_out is None:
        feed.reset()
        num_left_out = feed.send_charts(make(feed), zoomed=zoomed)
    assert num_left_out is not None, "after a reset nothing is asked for in part"
    return num_left_out


def _drop_request_range(request: SeriesRequest) -> SeriesRequest:
    """Return a series request without its ends: the key of the browser's points."""
    return structs.replace(
        request, from_step=None, to_step=None, from_time_unix_ns=None, to_time_unix_ns=None
    )


def _point_rows(reply: SeriesReply | None) -> list[Row]:
    """Return a series as rows of step, time, attempt and value, to compare with the browser's."""
    if reply is None:
        return []
    return list(zip(reply.step, reply.time_unix_ns, reply.attempt, reply.value, strict=True))


def _rows_to_requery(reply: SeriesReply, rows: Sequence[Row]) -> tuple[deque[Row], int]:
    """Return the rows to query again, and how many more are stored after the first of them.

    For a downsampled curve only the rows after its last finite one: earlier ones would return with
    more points each time, and be counted twice.
    """
    if not rows or reply.num_total <= len(rows):
        return deque(rows, NUM_RECENT), 0
    finite = (i for i, row in enumerate(rows) if row[3] is not None)
    recent_rows = deque(rows[max(finite, default=len(rows) - 1) :], NUM_RECENT)
    num_behind = sum(mark.step > recent_rows[0][0] for mark in reply.nonfinite)
    return recent_rows, max(0, num_behind - (len(recent_rows) - 1))


def _is_same_row(before: Row, now: Row) -> bool:
    """Return whether two rows look equal in the browser: means differ by rounding."""
    (*where, value), (*other_key, other) = before, now
    return where == other_key and (
        value == other
        or (value is not None and other is not None and math.isclose(value, other, rel_tol=1e-6))
    )


def _build_series_reply(sent: _Sent, reply: SeriesReply | None, rows: Sequence[Row]) -> SeriesReply:
    """Return the reply for a chart line with these rows and the browser's totals."""
    steps = {row[0] for row in rows}
    return structs.replace(
        sent.reply,
        num_total=sent.num_total,
        step=tuple(row[0] for row in rows),
        time_unix_ns=tuple(row[1] for row in rows),
        attempt=tuple(row[2] for row in rows),
        value=tuple(row[3] for row in rows),
        nonfinite=tuple(m for m in reply.nonfinite if m.step in steps) if reply else (),
        num_nonfinite=sent.num_nonfinite,
    )


def _charts_within_limit(charts: Sequence[Chart]) -> tuple[list[Chart], int]:
    """Return the charts whose points fit on the page, and how many do not."""
    num_points, fitting = 0, []
    for chart in charts:
        if num_points + chart.num_points <= MAX_POINTS:
            num_points += chart.num_points
            fitting.append(chart)
    return fitting, len(charts) - len(fitting)


def _layout(chart: Chart) -> Wire:
    """Return the part of a chart that the browser can change only by redrawing it."""
    return {
        "title": chart.title,
        "axis": chart.axis,
        "unit": chart.unit,
        "log": chart.log,
        "exact": chart.exact,
        "size": chart.size,
        "height": chart.height,
        "curves": [[curve.name, curve.role, curve.colour] for curve in chart.curves],
    }


def _whole_curve(curve: ChartCurve) -> Wire:
    """Return a whole curve as JSON for the browser's chart component."""
    x = [_integer_if_whole(x_value) for x_value in curve.x]
    is_whole = all(isinstance(x_value, int) for x_value in x)
    wire: Wire = {
        # Steps are close to each other, so differences are short.
        **({"from": x[:1], "by": [b - a for a, b in pairwise(x)]} if is_whole else {"x": x}),
        "y": [_round_to_float32(value) for value in curve.y],
        "total": curve.num_total,
        "bad": curve.num_nonfinite,
    }
    return wire


def _integer_if_whole(x: float) -> float | int:
    """Return a whole number as an integer, which makes the message to the browser shorter."""
    return int(x) if float(x).is_integer() else x


def _round_to_float32(value: float | None) -> float | int | None:
    """Limit a number to the seven digits of a float32 before it is sent to the browser."""
    if value is None or not math.isfinite(value):
        return None
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.7g}")


def _charts_by_mark(charts: Sequence[Chart]) -> dict[SentMark, int]:
    """Return a bit per chart for each mark in the browser: most are in several charts."""
    result: dict[SentMark, int] = {}
    for i, chart in enumerate(charts):
        for mark in chart.marks:
            sent = SentMark(mark.look.word, mark.place, mark.say()[:400], mark.num)
            result[sent] = result.get(sent, 0) | 1 << i
    return result


def _wire_mark(mark: SentMark, places: int) -> list[Any]:
    """Return a chart mark as JSON for the browser; ``places`` has a bit per chart."""
    return [mark.kind, mark.place, mark.text, places, mark.num]


def _mount_component(feed: ChartFeed, message: Wire, zoomed: Zoomed | None) -> None:
    charts_key = f"charts_{feed.key}"

    def ranged() -> None:
        selected_range = st.session_state[charts_key].range
        if zoomed is not None and selected_range:
            ends = (selected_range["first"], selected_range["last"])
            zoomed(selected_range["axis"], None if None in ends else ends)

    head = {"key": feed.key, "name": feed.name, "number": feed.number}
    register_component("chart")(
        key=charts_key,
        # As text: the component would treat a list of numbers as a table, and check each of them.
        data=msgspec.json.encode(head | message).decode(),
        height="content",
        on_missed_change=feed.reset,
        on_range_change=ranged,
    )
