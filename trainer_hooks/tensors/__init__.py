"""Tensors and optimizer state: finite values, copies to the host, sizes."""
