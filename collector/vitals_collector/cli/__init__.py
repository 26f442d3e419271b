"""Commands: `vitals collector`, and the commands that read, act and replay."""
