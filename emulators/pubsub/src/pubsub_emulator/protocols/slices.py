"""Splits long work on the event loop into slices, so that other calls can run in between."""

import asyncio
import time
from collections.abc import Callable, Iterator

SLICE_S = 0.002
"""Maximum duration of a slice.

Another call needs about ten loop iterations, and each iteration may include a slice.
"""


def run_slice(steps: Iterator[None]) -> bool:
    """Run steps for one slice. Returns True once they are finished."""
    until_s = time.monotonic() + SLICE_S
    return all(time.monotonic() <= until_s for _ in steps)


def run_later(pause_s: float, act: Callable[[], None]) -> None:
    """Call `act` after a pause."""
    asyncio.get_running_loop().call_later(pause_s, act)


def run_on(steps: Iterator[None]) -> None:
    """Run one slice now and the rest in later loop iterations."""
    if not run_slice(steps):
        asyncio.get_running_loop().call_soon(run_on, steps)
