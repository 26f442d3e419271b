"""The run page, as Streamlit wants it: a file."""

from vitals_dashboard.views import run

run.render()
