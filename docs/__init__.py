"""What is read by people, and what writes it."""
