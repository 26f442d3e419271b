"""Order of the training data: where a loop is in it, and which batches are skipped."""
