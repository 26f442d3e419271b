"""The pages and the way between them."""

import streamlit as st

from vitals_dashboard import frame

st.set_page_config(page_title="Vitals", page_icon=":material/vital_signs:", layout="wide")
frame.style()
st.navigation(
    [
        st.Page("vitals_page_overview.py", title="Overview", icon=":material/list:", default=True),
        st.Page("vitals_page_run.py", title="Run", icon=":material/monitor_heart:", url_path="run"),
        st.Page(
            "vitals_page_alerts.py",
            title="Alerts",
            icon=":material/notifications:",
            url_path="alerts",
        ),
    ],
    position="top",
).run()
