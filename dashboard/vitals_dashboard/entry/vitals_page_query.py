"""The query page, as Streamlit wants it: a file."""

from vitals_dashboard.views import query

query.render()
