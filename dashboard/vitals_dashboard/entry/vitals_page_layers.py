"""The layers page, as Streamlit wants it: a file."""

from vitals_dashboard.views import layers

layers.render()
