"""One guarded step: what a rank measures, the one sum over ranks, the verdict, the row."""
