"""`vitals doctor --burn-in`: tests the devices of a node on known answers."""
