"""What a person types: `vitals collector` and the commands that read, act and replay."""
