"""Detectors: problems of a step, found in reduced numbers only."""
