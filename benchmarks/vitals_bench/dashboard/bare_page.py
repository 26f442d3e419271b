"""The least Streamlit page with as many charts: ``streamlit run bare_page.py -- NUM_CHARTS``."""

from __future__ import annotations

import math
import sys

import streamlit as st

NUM_POINTS = 100
TALL, LOW = 330, 220


def draw(num_charts: int) -> None:
    """Draw one wide chart, and all others two per row, as the run page does."""
    st.set_page_config(layout="wide")
    points = [[i, math.sin(i / 10)] for i in range(NUM_POINTS)]
    spec = {
        "xAxis": {"type": "value"},
        "yAxis": {"type": "value"},
        "series": [{"type": "line", "showSymbol": False, "data": points}],
    }
    st.echarts_chart(spec, key="chart_0", height=TALL)
    for first in range(1, num_charts, 2):
        for column, i in zip(st.columns(2), range(first, num_charts), strict=False):
            column.echarts_chart(spec, key=f"chart_{i}", height=LOW)


if __name__ == "__main__":
    draw(int(sys.argv[1]))
