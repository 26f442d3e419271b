"""The post-mortem of a run: what is asked of the store, told as blocks, written as a page."""
