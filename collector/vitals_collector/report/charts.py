"""Charts of a document: curves with decisions, and heat maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainvitals.document.blocks import DrawnLines, Paragraph, TableBlock, TextBlock
from trainvitals.document.tree import Node, make_element
from trainvitals.views import CellsReply
from vitals_collector.report import svg_plot, text_plot
from vitals_collector.report.curves import CurveMark, PlottedCurve


@dataclass(frozen=True, slots=True)
class CurvePlot:
    """A curve with its decisions; the spans are steps of incidents."""

    curve: PlottedCurve
    marks: Sequence[CurveMark]
    spans: Sequence[tuple[int, int]] = ()

    @property
    def note(self) -> str:
        """Return the legend of the plotted curves for an HTML report."""
        return svg_plot.legend(self.marks)

    def to_figure(self) -> Node:
        """Plot the curve with its decisions as SVG for an HTML report."""
        caption = make_element("figcaption", svg_plot.caption(self.curve))
        return make_element(
            "figure", caption, svg_plot.draw_curve(self.curve, self.marks, self.spans)
        )

    def to_blocks(self) -> list[TextBlock]:
        """Plot the curve with characters for a report in text or Markdown."""
        first, last = self.curve.span
        shown = [mark for mark in self.marks if first <= mark.step <= last]
        lines = text_plot.draw(self.curve, self.marks, width=100)
        return [DrawnLines([*lines, text_plot.legend(shown)])]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One metric of all ranks or layers over steps."""

    title: str
    reply: CellsReply
    onset_step: int
    note: ClassVar[str] = ""

    def to_figure(self) -> Node:
        """Plot the heat map as SVG for an HTML report."""
        reply = self.reply
        scale = svg_plot.shades(reply)
        low, high = scale.ticks()[0], scale.ticks()[-1]
        unit = f" {reply.unit}" if reply.unit else ""
        text = f": dark is {low:.4g}{unit}, bright {high:.4g}{unit}"
        text += ", logarithmic" if scale.is_log else ""
        if reply.num_rows > len(reply.rows):
            text += f"; {len(reply.rows)} of {reply.num_rows} rows, those that deviate most"
        text += "; a cross is a value that is not finite" if reply.nonfinite else ""
        text += f"; {self._rollbacks()}" if self._rollbacks() else ""
        caption = make_element("figcaption", make_element("b", self.title), text)
        return make_element("figure", caption, svg_plot.draw_cells(reply, self.onset_step))

    def to_blocks(self) -> list[TextBlock]:
        """Return the heat map as a table for text reports: each row's extremes and its step."""
        reply = self.reply
        lost = {row for row, _ in reply.nonfinite}
        rows = []
        for number, (name, values) in enumerate(zip(reply.rows, reply.value, strict=True)):
            cells = zip(values, reply.step, strict=True)
            points = [(value, step) for value, step in cells if value is not None]
            least, most = min(points, default=(None, None)), max(points, default=(None, None))
            rows.append((name, least[0], most[0], most[1], "yes" if number in lost else "no"))
        header = (self.title, "least", "greatest", "about step", "not finite values")
        num_omitted = reply.num_rows - len(reply.rows)
        notes = [f"{num_omitted} rows that deviate less are left out."] if num_omitted > 0 else []
        notes += [f"{self._rollbacks().capitalize()}."] if self._rollbacks() else []
        return [TableBlock(header, rows), *map(Paragraph, notes)]

    def _rollbacks(self) -> str:
        """Return the note on discarded steps below a report's heat map; "" without any."""
        if self.reply.rolled_back is None:
            return ""
        first, last = self.reply.rolled_back
        steps = f"steps {first} to {last} include rollbacks"
        return f"{steps}: a cell shows the worst of all attempts"
