"""The checkpoints page, as Streamlit wants it: a file."""

from vitals_dashboard.views import checkpoints

checkpoints.render()
