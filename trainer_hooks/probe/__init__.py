"""Re-evaluates earlier batches with the current weights, to check a suspected problem."""
