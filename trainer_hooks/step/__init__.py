"""One guarded step: measurements of a rank, the one all-reduce, the verdict, the row."""
