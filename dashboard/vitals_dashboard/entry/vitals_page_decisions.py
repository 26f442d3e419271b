"""The decisions page, as Streamlit wants it: a file."""

from vitals_dashboard.views import decisions

decisions.render()
