"""The overview page, as Streamlit wants it: a file."""

from vitals_dashboard.views import overview

overview.render()
