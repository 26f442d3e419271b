"""The store: its tables, the two forms of rows, and the conversion between them."""
