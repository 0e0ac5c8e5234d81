"""Waits for conditions for which the product has no event."""

import asyncio
import time
from collections.abc import Callable

from tests.limits import WAIT_LIMIT_S

_TURNS_S = 0.02
_PAUSE_S = 0.001


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds()` is true. The code that makes it true must run on the same event loop.

    That usually takes a few loop iterations. Longer waits depend on a timer or on another process,
    and spinning would take a core away from that process.
    """
    turns_until_s = time.perf_counter() + _TURNS_S
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not holds():  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0 if time.perf_counter() < turns_until_s else _PAUSE_S)
