"""The `vitals` command: the core's own commands, and those that installed programs register."""
