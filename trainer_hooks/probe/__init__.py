"""Asks the present state how it does on batches that it did well on before."""
