"""Deletes predictions from the store, as the API does once it has read them."""

import time

from tests.record_stores import RecordStores


async def delete_ended(stores: RecordStores, record: str, keep_s: float = 1000.0) -> bool | None:
    """Deletes a finished prediction's record.

    A broker may still deliver its job for `keep_s` seconds.

    Returns:
        True if it was deleted. False if it has changed since it was read.
    """
    known = await stores.records.read(record)
    assert known is not None
    return await stores.predictions.delete(record, known, time.time() + keep_s)
