"""What goes on: every run followed live, judged by the watchers, told as alerts."""
