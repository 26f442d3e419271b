"""The training that ``vitals demo`` watches: a small GPT on the standard library's sources."""
