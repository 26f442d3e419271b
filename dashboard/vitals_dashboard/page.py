"""Streamlit's own page for browsers, with the server's path and preloaded files."""

from pathlib import Path

import streamlit as st
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

_ENTRY, _PREFIX = Path(__file__).with_name("entry"), "vitals_page_"
PROGRAMS = ("chart", "uPlot.esm")
"""Scripts of the charts: fetched while Streamlit's own are run, and not with the first chart."""
# Without it, a page looks for its server below its own path first, and is refused: a round trip in
# which nothing is drawn.
_SERVER = """<script>
      window.__streamlit = { BACKEND_BASE_URL: new URL("./", location.href).href };
    </script>"""


def streamlit_index_page() -> str:
    """Return Streamlit's HTML page with links to the dashboard's own programs."""
    text = (Path(st.__file__).parent / "static" / "index.html").read_text()
    folder = "./_stcore/bidi-components/trainvitals.charts"
    links = [f'<link rel="modulepreload" href="{folder}/{name}.js">' for name in PROGRAMS]
    return text.replace("<head>", "\n    ".join(["<head>", _SERVER, *links]), 1)


def paths() -> list[str]:
    """Return the URL path of each dashboard page, one per file; the first has none."""
    names = (path.stem.removeprefix(_PREFIX) for path in sorted(_ENTRY.glob(f"{_PREFIX}*.py")))
    return ["" if name == "overview" else name for name in names]


def routes(text: str) -> list[Route]:
    """Return routes that serve Streamlit's HTML at the path of each dashboard page."""

    async def answer(_: Request) -> HTMLResponse:
        return HTMLResponse(text, headers={"cache-control": "no-cache"})

    return [Route(f"/{path}", answer) for path in paths()]
