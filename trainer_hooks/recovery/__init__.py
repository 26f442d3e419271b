"""States to go back to, in memory and on disk, and the way back."""
