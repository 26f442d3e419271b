"""The numbers of all runs: appended in commits, asked by run and step; in a lake or in memory."""
