"""Files of bad steps, which `vitals repro` runs again."""
