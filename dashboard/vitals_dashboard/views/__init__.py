"""One module per page; each has ``render(source)``, called by a page file of a few lines."""
