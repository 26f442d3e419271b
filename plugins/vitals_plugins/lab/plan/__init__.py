"""`vitals plan`: the estimate, and its command."""
