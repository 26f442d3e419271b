"""What judges a run, held against worlds of which everything is known."""
