"""The incident page, as Streamlit wants it: a file."""

from vitals_dashboard.views import incident

incident.render()
