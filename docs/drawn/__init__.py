"""The examples of docs/DETECTORS.md: courses of runs, judged by the real detectors, and drawn."""
