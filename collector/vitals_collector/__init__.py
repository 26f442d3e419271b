"""The collector: ingest, store, query API, alerts and commands of many runs."""
