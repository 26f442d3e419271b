"""`vitals drill`: injects faults into a copy of a training, and checks the promises."""
