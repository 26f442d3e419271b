"""Mirrors: what Vitals sees of a run, written into the trackers that people use already.

A mirror is a process of its own that reads a run as `vitals tail` does. Nothing of a tracker is
imported by a rank, an agent or a collector, so none that hangs or fails can reach them.
"""
