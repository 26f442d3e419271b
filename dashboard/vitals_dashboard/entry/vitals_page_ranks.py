"""The ranks page, as Streamlit wants it: a file."""

from vitals_dashboard.views import ranks

ranks.render()
