"""What a loop may add: averaged weights, early stopping."""
