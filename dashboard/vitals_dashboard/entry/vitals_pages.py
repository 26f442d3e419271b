"""The pages and the way between them."""

from pathlib import Path

import streamlit as st

from vitals_dashboard import access, layout

# A local file: Streamlit would fetch a material icon for the tab from the internet.
ICON = Path(__file__).with_name("vitals_icon.svg")

st.set_page_config(page_title="Vitals", page_icon=str(ICON), layout="wide")
layout.style()
if not access.role():
    access.draw_no_access_page()
    st.stop()
st.navigation(
    [
        st.Page("vitals_page_overview.py", title="Fleet", icon=":material/list:", default=True),
        st.Page("vitals_page_run.py", title="Run", icon=":material/monitor_heart:", url_path="run"),
        st.Page(
            "vitals_page_compare.py",
            title="Compare",
            icon=":material/compare_arrows:",
            url_path="compare",
        ),
        st.Page(
            "vitals_page_alerts.py",
            title="Alerts",
            icon=":material/notifications:",
            url_path="alerts",
        ),
        st.Page(
            "vitals_page_query.py", title="Query", icon=":material/manage_search:", url_path="query"
        ),
        # Pages of one run: the bar on each of them links to the others, and keeps the run.
        *(
            st.Page(file, title=label, icon=icon, url_path=path, visibility="hidden")
            for path, file, (label, icon) in (
                ("layers", layout.LAYERS, layout.RUN_PAGES[layout.LAYERS]),
                ("ranks", layout.RANKS, layout.RUN_PAGES[layout.RANKS]),
                ("decisions", layout.DECISIONS, layout.RUN_PAGES[layout.DECISIONS]),
                ("checkpoints", layout.CHECKPOINTS, layout.RUN_PAGES[layout.CHECKPOINTS]),
                ("incident", layout.INCIDENTS, layout.RUN_PAGES[layout.INCIDENTS]),
            )
        ),
    ],
    position="top",
).run()
access.draw_access_footer()
