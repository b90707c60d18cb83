"""Measure the memory that operations allocate."""
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Record the bytes of each storage that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        existing = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        storages = [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.bytes += [s.nbytes() for s in storages if s.nbytes() and s.data_ptr() not in existing]
        return result
