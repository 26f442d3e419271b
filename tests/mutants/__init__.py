"""Mutation run: how many small changes of the code the tests notice (`make mutants`)."""
