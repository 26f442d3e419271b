"""Fleet detectors: they only report, on steps of the job and on samples of its nodes."""

from trainvitals.detect.fleet.set import FleetConfig, FleetDetectors

__all__ = ["FleetConfig", "FleetDetectors"]
