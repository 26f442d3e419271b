"""What comes in: checked, placed once, committed together; over HTTP and from folders."""
