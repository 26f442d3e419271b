"""Optional signals beyond the gradient norm; each module measures one, and documents its cost.

Values measured after an update are sent in the reduce vector of the next step, because a step has
only one collective.
"""
