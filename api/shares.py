"""How much of what an instance holds for all callers one tenant may take."""

from __future__ import annotations

LARGEST_SHARE = 0.75
"""The rest is left for the others."""


def share_of(most: int) -> int:
    """What one tenant may take of `most`."""
    return max(1, int(most * LARGEST_SHARE))
