"""`vitals audit`: applies Vitals' detectors and policy to a training logged by another tool."""
