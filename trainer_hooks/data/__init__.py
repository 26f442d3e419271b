"""Position in the training data, skipped batches, and the samples of each step."""
