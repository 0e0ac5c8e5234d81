"""Deletes predictions from the store, as the API does once it has read them."""

import time

from shared.stores.records import Records


async def delete_ended(records: Records, record: str, keep_s: float = 1000.0) -> bool | None:
    """Deletes the record of a finished prediction. A broker may deliver its job for `keep_s`.

    Returns:
        True if it was deleted. False if it has changed since it was read.
    """
    known = await records.read(record)
    assert known is not None
    return await records.delete(record, known, time.time() + keep_s)
