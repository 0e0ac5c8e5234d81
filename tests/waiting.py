"""Waits that nothing in the product gives an event for."""

import asyncio
from collections.abc import Callable

from tests.limits import WAIT_LIMIT_S


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds()`. Whatever is to change it runs on the same event loop."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not holds():  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0)
