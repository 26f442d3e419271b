"""Watchers: detectors that only tell, on steps of the whole job and on samples of its nodes."""

from trainvitals.detect.fleet.set import FleetConfig, FleetDetectors

__all__ = ["FleetConfig", "FleetDetectors"]
