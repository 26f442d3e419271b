"""Numbers that the ranks exchange in a step, and the rows and events that a rank writes."""
