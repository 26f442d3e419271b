"""`vitals drill`: injects faults into a copy of the user's training, and judges the reaction."""
