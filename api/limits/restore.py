"""Restores budget counters after Redis has lost its counts: `penstock budgets restore`.

A budget's counter is the sum of its rows (docs/reference/limits.md), so the rows in BigQuery
determine the correct counters for this month and the previous month. Only budgets currently set for
a plan or a key are restored.

It can run while requests are arriving, and several runs can overlap. It reads a counter, then the
rows for requests completed before that reading, and adds the amount by which the rows exceed the
counter. Amounts reserved by requests in flight at that moment are counted as if their rows existed.
As a result, no counter ends up higher than its rows, but the counter for a budget in use may still
be too low. Running it again adds the missing amount.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

from api.limits.accounts import BudgetReading, LimitStore, RowsAsk, budget_name
from api.limits.counters import ROUNDING_USD, month_of
from api.limits.spent import SpentQuestion, SpentReader, SpentRows
from shared.errors import ConfigurationError
from shared.money.amounts import plain
from shared.settings import ApiSettings
from shared.stores.key_stores import key_store
from shared.tenants.directory import BudgetHolder, Directory, decode_document

REDIS_LIMIT_S = 5.0
QUERY_LIMIT_S = 120.0


class Restored(NamedTuple):
    """One month's counter, before and after it is restored."""

    name: str
    """`t:TENANT:usd`, or `k:TENANT:KEY_ID:usd`."""
    month: int
    counted_usd: float
    """Amount in Redis, excluding reservations by requests in flight."""
    rows_usd: float
    """Amount in rows for requests completed before the counter was read."""
    is_busy: bool
    """True if requests in flight have reserved part of the budget."""
    is_changed: bool
    """True if the counter was, or would have been, adjusted to match its rows."""


async def restore(
    store: LimitStore,
    spent: SpentReader,
    holders: Sequence[BudgetHolder],
    *,
    lowers: bool = False,
    writes: bool = True,
    now_s: float | None = None,
) -> list[Restored]:
    """Adds amounts that are in rows but missing from Redis to the budget counters.

    Args:
        lowers: True to also lower a counter that exceeds its rows. Use this only when no requests
            are in flight and all rows have arrived.
        writes: False to compare the amounts without changing anything.
        now_s: Unix time, or None for now.

    Returns:
        The counters that differ from their rows, sorted by name and month.

    Raises:
        Unavailable: Redis or BigQuery did not respond. Earlier changes remain in effect.
    """
    month = int(month_of(time.time() if now_s is None else now_s))
    places = [(budget_name(holder), of) for holder in holders for of in (month, month - 1)]
    before = await store.compare([RowsAsk(*place) for place in places])
    at_s = min((reading.at_ms for reading in before), default=0.0) / 1000
    questions = [SpentQuestion(holder, at_s) for holder in holders]
    sums = await asyncio.to_thread(spent.read, month, questions)
    rows = [usd for amounts in sums for usd in amounts]
    if writes:
        await store.compare(
            [
                RowsAsk(*place, usd, reading.used - reading.raised, lowers)
                for place, usd, reading in zip(places, rows, before, strict=True)
            ]
        )
    restored = [
        _restore_budget(*place, usd, reading, lowers=lowers)
        for place, usd, reading in zip(places, rows, before, strict=True)
    ]
    return sorted(
        entry for entry in restored if abs(entry.rows_usd - entry.counted_usd) > ROUNDING_USD
    )


def _restore_budget(
    name: str, month: int, usd: float, reading: BudgetReading, *, lowers: bool
) -> Restored:
    is_busy = reading.held > ROUNDING_USD
    missing_usd = usd - reading.used
    is_lowered = lowers and not is_busy and missing_usd < -ROUNDING_USD
    is_changed = missing_usd > ROUNDING_USD or is_lowered
    return Restored(name, month, reading.used - reading.held, usd, is_busy, is_changed)


async def restore_deployment(
    settings: ApiSettings, *, lowers: bool, writes: bool, max_bytes: int
) -> list[Restored]:
    """Restores the budgets of the deployment named in the settings, as `restore` does.

    Args:
        max_bytes: maximum number of bytes that the query may read.

    Raises:
        ConfigurationError: there is no key directory.
        Unavailable: the directory, Redis, or BigQuery did not respond.
    """
    if not settings.keys_url:
        raise ConfigurationError(
            "PENSTOCK_KEYS_URL is not set, so tenants have no budgets", field="keys_url"
        )
    async with key_store(settings.keys_url) as keys:
        stored = await keys.read()
        assert stored is not None, "read without a version, so it is always returned; this is a bug"
        directory = Directory(decode_document(stored.data, keys.source))
    place = settings.project, settings.dataset, settings.bigquery_endpoint
    store = LimitStore(
        settings.records_redis_url, f"restore-{secrets.token_hex(4)}", timeout_s=REDIS_LIMIT_S
    )
    async with store:
        return await restore(
            store,
            SpentRows(*place, max_bytes, QUERY_LIMIT_S),
            sorted(directory.budgets),
            lowers=lowers,
            writes=writes,
        )


def describe(counter: Restored, *, writes: bool) -> str:
    """Returns a line describing a counter that differs. `writes`: as in `restore`."""
    year, month = divmod(counter.month, 12)
    outcome = (
        "exceeds its rows, unchanged" if counter.rows_usd < counter.counted_usd else "not restored"
    )
    if counter.is_changed:
        outcome = "restored" if writes else "to be restored"
    if counter.is_busy:
        outcome += " (in use: run again)"
    return (
        f"{counter.name.removesuffix(':usd')} {year}-{month + 1:02}: counted "
        f"${plain(counter.counted_usd)}, rows ${plain(counter.rows_usd)}: {outcome}"
    )
