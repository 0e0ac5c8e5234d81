"""An LRU cache of what encoders computed, which is kept on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
_Encoded = tuple[torch.Tensor, ...]


class KeptEncodings(Generic[Key]):
    """An LRU cache of tensors on the device.

    Args:
        kept_bytes: what they take at most.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[Key, _Encoded] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> _Encoded | None:
        """Returns what is kept. None: nothing."""
        return self._kept.get(key)

    def keep(self, used: Mapping[Key, _Encoded]) -> None:
        """Keeps what was used now, and lets go of what was used least recently."""
        for key, encoded in used.items():
            if key not in self._kept:
                self._bytes += _size_bytes(encoded)
            self._kept[key] = encoded
            self._kept.move_to_end(key)
        while self._bytes > self._kept_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size_bytes(dropped)


def _size_bytes(encoded: _Encoded) -> int:
    return sum(part.nbytes for part in encoded)
