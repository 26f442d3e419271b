"""Early stopping."""
