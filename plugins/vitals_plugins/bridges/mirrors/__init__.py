"""Mirrors: copy a run's data to other trackers.

A mirror is a separate process that reads a run as `vitals tail` does. No rank, agent or collector
imports a tracker's library, so a hanging or failing one cannot affect them.
"""
