"""Counts the operations of a step."""

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"alias", "detach", "lift_fresh", "select", "slice", "split_with_sizes", "unbind"}
VIEWS |= {"unsqueeze", "view"}


class Counted(TorchDispatchMode):
    """Counts the operations that reach a device's kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace == "aten" and name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
