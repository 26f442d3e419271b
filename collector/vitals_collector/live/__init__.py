"""Live processing of every run: fleet detectors, run states and alerts."""
