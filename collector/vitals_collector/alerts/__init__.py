"""What is done: the inbox of alerts, its notifiers, and commands to runs."""
