"""The compare page, as Streamlit wants it: a file."""

from vitals_dashboard.views import compare

compare.render()
