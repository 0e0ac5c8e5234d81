"""Tunes Python's garbage collector for a serving process. Call this once, after startup."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Number of allocations between two collections of young objects.

With the default of 700, there would be several collections per request.
"""


def settle_heap(*, grows_by_millions: bool = False) -> None:
    """Excludes all objects created at startup from later collections, and collects less often.

    Otherwise, modules and long-lived objects would add milliseconds to each collection.

    Args:
        grows_by_millions: True if millions of objects may be created and kept. They are then
            collected in smaller batches (400,000 take 0.1 s) and almost never all at once.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *((2, 1000) if grows_by_millions else (20, 20)))
