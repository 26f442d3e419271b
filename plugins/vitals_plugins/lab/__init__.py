"""Offline examinations: plans, bad steps that are run again, loss landscapes, burn-in."""
