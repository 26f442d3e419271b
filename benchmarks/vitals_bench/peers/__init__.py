"""What others do, to be measured beside: a published rule, and the loggers that are installed."""
