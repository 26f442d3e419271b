"""`vitals repro`: runs a bad step again from its capsule, and names the cause."""
