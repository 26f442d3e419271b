"""`vitals preflight`: measures the nodes of a job before the training starts."""
