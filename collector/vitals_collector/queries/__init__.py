"""What is asked: runs, curves, steps, the ledger, and why; read from the store."""
