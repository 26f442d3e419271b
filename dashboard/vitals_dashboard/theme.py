"""Visual language: meaning of colors and shapes, in light and in dark.

Colors are Okabe and Ito's, which color-blind people can distinguish; an action is never shown by
color alone but also by its shape and its name.
"""

from dataclasses import dataclass

from trainvitals.records import ActionName

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#8A8F98"


@dataclass(frozen=True, slots=True)
class ActionLook:
    """Shape, color and name of one action of the policy."""

    word: str
    colour: str
    symbol: str
    """A shape that the chart component knows, drawn at the head of the vertical mark."""
    line: str
    width: float
    icon: str


ACTIONS: dict[ActionName, ActionLook] = {
    "skip_step": ActionLook(
        "skip", ORANGE, "triangle", "dotted", 1.0, "\N{BLACK UP-POINTING TRIANGLE}"
    ),
    "rollback": ActionLook("rollback", PURPLE, "diamond", "solid", 1.6, "\N{BLACK DIAMOND}"),
    "halt": ActionLook("halt", VERMILLION, "rect", "solid", 2.2, "\N{BLACK SQUARE}"),
    "restart": ActionLook(
        "job ended", BLUE, "down", "dashed", 1.6, "\N{CLOCKWISE OPEN CIRCLE ARROW}"
    ),
    "accept_level": ActionLook("new level", GREEN, "circle", "dashed", 1.0, "\N{BLACK CIRCLE}"),
}
"""``continue`` is not drawn: nothing was done."""

NON_FINITE_COLOUR = "#C4161C"
"""Red, darker than every other color here, and always a cross."""

STATE_WORDS = {
    "running": "\N{BLACK CIRCLE} running",
    "finished": "\N{CHECK MARK} finished",
    "halted": "\N{BLACK SQUARE} halted",
    "interrupted": "\N{HEAVY VERTICAL BAR}\N{HEAVY VERTICAL BAR} interrupted",
    "failed": "\N{MULTIPLICATION X} failed",
    "lost": "? lost",
    "hung": "\N{BLACK SQUARE} hung",
}
"""By a run's state; a running one that hangs has another."""
STATE_BADGES = {
    "running": "blue",
    "finished": "green",
    "halted": "red",
    "interrupted": "gray",
    "failed": "red",
    "lost": "orange",
    "hung": "red",
}
HEALTH_WORDS = {
    "healthy": "\N{CHECK MARK} healthy",
    "acting": "\N{BLACK UP-POINTING TRIANGLE} acting",
    "critical": "\N{BLACK SQUARE} critical",
    "unguarded": "\N{WARNING SIGN} unguarded",
    "unknown": "\N{EN DASH} unknown",
}
HEALTH_BADGES = {
    "healthy": "green",
    "acting": "orange",
    "critical": "red",
    "unguarded": "red",
    "unknown": "gray",
}
LABELS = {
    "red": "#B3261E",
    "orange": "#8A4B00",
    "green": "#00694D",
    "blue": "#005A8E",
    "gray": "#5B626D",
}
"""Colors of labels in tables, by those of badges: dark enough for white text."""
SEVERITY_BADGES = {"page": "red", "notify": "orange", "log": "gray"}
CHECKPOINT_WORDS = {
    "candidate": "\N{HORIZONTAL ELLIPSIS} candidate",
    "verified": "\N{CHECK MARK} verified",
    "healthy": "\N{CHECK MARK}\N{CHECK MARK} healthy",
    "retired": "\N{EN DASH} retired",
    "bad": "\N{MULTIPLICATION X} bad",
}
ALERT_WORDS = {
    "pending": "\N{HORIZONTAL ELLIPSIS} pending",
    "firing": "\N{BLACK UP-POINTING TRIANGLE} firing",
    "resolved": "\N{CHECK MARK} resolved",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Colors of a chart on one background."""

    main: str
    lines: tuple[str, ...]
    diverging: tuple[str, ...]
    """Below, near and above the middle: blue to orange, which color-blind people can
    distinguish."""
    over: str
    """Lines drawn over the cells of a heat map."""
    quiet: str = "#757B86"
    """It suits both backgrounds: a browser sends its theme only after the first drawing."""


LIGHT = Palette(
    main=BLUE,
    lines=(BLUE, GREEN, PURPLE, SKY, ORANGE, "#5D4A9C", "#7A5C00", GREY),
    diverging=("#0B4F8A", "#5B9BD0", "#E4E7EB", "#E8A15C", "#9A4207"),
    over="#FFFFFF",
)
DARK = Palette(
    main=SKY,
    lines=(SKY, "#33C7A0", "#E3A6C8", "#4F8FD6", ORANGE, "#A99BE0", YELLOW, GREY),
    diverging=("#7CC4F2", "#2E79AE", "#343A43", "#C27A16", "#FFCB6B"),
    over="#FFFFFF",
)


def palette(theme: str | None) -> Palette:
    """Return the dashboard's colors in a theme; light if the browser has not sent it yet."""
    return DARK if theme == "dark" else LIGHT


SEQUENTIAL = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151", "#FDE725")
"""Viridis: its lightness rises evenly, so it is readable in gray and for color-blind people."""

UNITS: dict[str, tuple[str, float]] = {
    "bytes": ("GiB", 1 / 2**30),
    "ratio": ("%", 100.0),
    "hertz": ("GHz", 1e-9),
    "seconds": ("s", 1.0),
    "watts": ("W", 1.0),
    "celsius": ("\N{DEGREE SIGN}C", 1.0),
}
"""Base unit to displayed unit, and the factor."""

STYLE = """<style>
.stMainBlockContainer{padding-top:4.4rem;padding-bottom:2rem;max-width:2200px}
.st-key-run_title [data-testid="stText"],.st-key-run_title p{font-size:1.45rem;font-weight:650;
line-height:1.25;white-space:pre-wrap;overflow-wrap:anywhere;font-family:inherit}
.st-key-run_facts [data-testid="stText"]{font-size:.82rem;opacity:.7;font-family:inherit}
[data-stale]{opacity:1!important;transition:none!important}
[data-testid="stMetric"]{padding:0!important}
[data-testid="stMetric"]>div{padding:.4rem .8rem!important}
[data-testid="stStatusWidget"]:has([data-testid*="Icon"]){display:none}
[data-testid="stMetricValue"]{font-size:1.3rem;line-height:1.3}
[data-testid="stMetricLabel"] p{font-size:.78rem}
[data-testid="stMetricDelta"]{font-size:.72rem;padding-top:0;padding-bottom:0}
[class*="st-key-alert_text"] [data-testid="stText"]{font-family:inherit;overflow-wrap:anywhere}
[class*="st-key-prose_"] [data-testid="stText"]{font-family:inherit;font-size:1rem;line-height:1.5;
white-space:pre-wrap;overflow-wrap:anywhere;max-width:100ch}
[class*="st-key-facts_"] [data-testid="stText"]{font-family:inherit;font-size:.85rem;opacity:.75;
white-space:pre-wrap;overflow-wrap:anywhere;max-width:none}
[data-testid="stCaptionContainer"],[data-testid="stMetric"] [data-testid="stMarkdownContainer"]{
color:inherit}
[data-testid="stCaptionContainer"]{opacity:.8}
.st-key-run_links{flex-wrap:wrap}
.st-key-fleet_totals>div{flex:1 1 6.6rem;min-width:6.6rem}
[class*="st-key-narrow_runs"]{display:none}
[data-testid="stMarkdownContainer"] :is(h2,h3,h4){font-size:1.05rem;font-weight:650;
padding:.25rem 0 .35rem}
[data-testid="stLayoutWrapper"]:has(>.st-key-page_heading,>.st-key-charts_loaded){
position:absolute!important}
.st-key-page_heading,.st-key-charts_loaded{position:absolute!important;width:1px!important;height:1px!important;
overflow:hidden;clip-path:inset(50%)}
.st-key-verdict_strip [data-testid="stText"],.st-key-strip_next [data-testid="stText"]{
font-family:inherit;white-space:pre-wrap;overflow-wrap:anywhere}
.st-key-strip_next [data-testid="stText"]{font-size:.88rem}
[class*="st-key-fact_"]{flex-wrap:nowrap}
@media (min-width:900px){.st-key-verdict_strip{flex-wrap:nowrap}}
[class*="st-key-prose_verdict"] [data-testid="stMarkdown"] p{opacity:.8}
@media (max-width:640px){.stMainBlockContainer{padding-top:3.9rem}
[class*="st-key-wide_runs"]{display:none}[class*="st-key-narrow_runs"]{display:flex}
.st-key-run_and_choice{flex-wrap:nowrap}
.st-key-run_head{gap:.2rem .5rem}.st-key-verdict_strip{gap:.4rem}
.st-key-verdict_strip [data-testid="stText"]{font-size:.88rem;line-height:1.35}
.st-key-run_bar,.st-key-run_links{flex-wrap:nowrap;overflow-x:auto}
.st-key-run_links{flex:0 0 auto}}
[data-tag-index],button[kind^="primary"]{background-color:#0072B2!important;
border-color:#0072B2!important}
[data-testid="stElementToolbarButton"]:has([aria-label="Download as CSV"]){display:none}
</style>"""
"""A constant text: the only HTML that the pages send.

Nothing fades during a refresh: the chart is still valid, and fading costs a browser as much as a
curve. Captions are darker than Streamlit's own, whose gray has too little contrast; so are
backgrounds of white text, because the dark theme's primary color has to be light. A table's own
download is hidden: it writes cells that a spreadsheet would run as formulas. The query page offers
a safe one.
"""
