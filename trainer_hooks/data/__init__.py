"""The loop's data: where it is, what it passes over, and which samples fed each step."""
