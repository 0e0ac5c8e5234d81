"""An LRU cache of encoder results, whose tensors stay on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class KeptEncodings:
    """An LRU cache of values that contain tensors.

    Args:
        kept_bytes: maximum total size of the tensors.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> Any | None:
        """Returns a value and marks it as most recently used.

        Returns None if the value isn't cached.
        """
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def keep(self, key: Hashable, value: Any) -> None:
        """Adds a value. Evicts the least recently used values that no longer fit."""
        self._entries[key] = value
        self._bytes += _size_bytes(value)
        while self._bytes > self._kept_bytes:
            _, removed = self._entries.popitem(last=False)
            self._bytes -= _size_bytes(removed)


def _size_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
