"""What a page sends to the chart component, as the browser unpacks it."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from streamlit.testing.v1 import AppTest

Points = list[tuple[float, float | None]]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One chart of a message that holds everything."""

    wire: dict[str, Any]
    marks: list[tuple[str, float, str]]
    """Kind, place and text."""

    @property
    def names(self) -> list[str]:
        """Return the names of the curves."""
        return [name for name, _, _ in self.wire["curves"]]

    def curve(self, name: str) -> Points:
        """Return the points of the first curve of a name."""
        line = self.wire["lines"][self.names.index(name)]
        xs = line.get("x") or list(itertools.accumulate([*line["from"], *line["by"]]))
        return list(zip(xs, line["y"], strict=True))

    def colour(self, name: str) -> int:
        """Return which colour a curve has."""
        return int(self.wire["curves"][self.names.index(name)][2])

    def counts(self) -> tuple[int, int]:
        """Return how many points of the main curves are drawn, and how many there are."""
        main = [i for i, (_, role, _) in enumerate(self.wire["curves"]) if role == "main"]
        lines = [self.wire["lines"][i] for i in main]
        return sum(len(line["y"]) for line in lines), sum(line["total"] for line in lines)

    def marked(self, kind: str) -> list[tuple[float, str]]:
        """Return place and words of the marks of a kind."""
        return [(place, words) for own, place, words in self.marks if own == kind]


def messages(app: AppTest) -> list[dict[str, Any]]:
    """Return what is sent to the charts of a page."""
    return [json.loads(text) for text in _sent(app, "charts") if text]  # one loads the program only


def commands(app: AppTest) -> list[str]:
    """Return the commands that can be copied from a page."""
    return _sent(app, "command")


def _sent(app: AppTest, component: str) -> list[str]:
    mounted = [e.proto for e in app.get("bidi_component")]
    return [json.loads(m.json) for m in mounted if m.component_name.endswith(component)]


def drawn(app: AppTest) -> dict[str, Drawn]:
    """Return the charts of a page that were sent whole, by their titles."""
    result = {}
    for message in messages(app):
        for i, chart in enumerate(message["charts"]):
            marks = [(mark[0], mark[1], mark[2]) for mark in message["marks"] if mark[3] >> i & 1]
            result[chart["title"]] = Drawn(wire=chart, marks=marks)
    return result
