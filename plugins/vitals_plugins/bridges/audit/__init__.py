"""`vitals audit`: what Vitals would have done in a training that another tool logged."""
