"""What tensors of this process hold, by storage."""

from __future__ import annotations

import gc

from torch import Tensor


def live_storages() -> dict[int, int]:
    """Address -> bytes of every storage that a tensor in Python's reach uses.

    What only a graph has saved is not seen.
    """
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def live_bytes() -> int:
    return sum(live_storages().values())
