"""How often Python looks for cycles in a process that serves; called once, when it has started."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Allocations between two looks at the young objects. The default of 700 means several looks in each request."""


def settle_heap() -> None:
    """Takes what the start left behind out of every later collection, and makes collections rarer.

    Modules and parts live as long as the process; walking them again and again costs milliseconds each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
