"""Averaged weights and early stopping."""
