"""Post-mortem of a run: queries the store, builds blocks, and writes a page."""
