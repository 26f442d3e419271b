"""The alerts page, as Streamlit wants it: a file."""

from vitals_dashboard.views import alerts

alerts.render()
