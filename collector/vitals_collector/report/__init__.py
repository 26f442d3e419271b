"""What would have been: stored runs and other people's logs, judged again."""
