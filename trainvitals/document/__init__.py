"""Documents: blocks of text, facts, tables, commands and charts, and one writer per format."""
