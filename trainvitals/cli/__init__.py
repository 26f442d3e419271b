"""The `vitals` command: built-in commands, and those that installed programs register."""
