"""Adapters to the frameworks that own the training loop; each is imported by its name.

None of them is imported by ``trainer_hooks`` itself. All are ``trainer_hooks.attach`` at the right
places of the framework's step: they skip, and do not roll back.
"""
