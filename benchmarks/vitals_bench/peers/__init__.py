"""Peers to compare with: a published rule, and the installed loggers."""
