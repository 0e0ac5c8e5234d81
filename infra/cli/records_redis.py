"""Runs a command on a store in the records Redis, with the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

from shared.errors import Unavailable

if TYPE_CHECKING:
    from shared.models.catalog import Catalog

Store = TypeVar("Store")
Done = TypeVar("Done")


def run_on(
    open_store: Callable[[str], AbstractAsyncContextManager[Store]],
    act: Callable[[Store, Catalog], Awaitable[Done]],
) -> Done:
    """Opens a store and returns the result of `act`.

    Raises:
        Unavailable: Redis did not respond. The message names the setting.
    """
    from shared.models.catalog_file import read_catalog
    from shared.settings import Settings, read_settings

    settings = read_settings(Settings)

    async def run() -> Done:
        async with open_store(settings.records_redis_url) as store:
            try:
                return await act(store, read_catalog(settings.models_file))
            except Unavailable as error:
                reason = f"PENSTOCK_RECORDS_URL, PENSTOCK_REDIS_URL: {error.message}"
                raise Unavailable(reason) from error

    return asyncio.run(run())
