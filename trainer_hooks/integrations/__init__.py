"""Adapters to the frameworks that own the training loop; each is imported by its name.

None of them is imported by ``trainer_hooks`` itself. Each calls the parts of
``trainer_hooks.attach`` at the right points of the framework's step: they skip, and do not roll
back.
"""
