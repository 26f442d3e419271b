"""The dashboard: a Streamlit app that reads a collector's query API and owns no data."""
