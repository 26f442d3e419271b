"""Connections to other tools: their logs, trackers, OpenTelemetry and Prometheus remote write."""
