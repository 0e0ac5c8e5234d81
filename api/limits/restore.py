"""`python -m api.limits.restore`: what `penstock budgets restore` runs after Redis lost its counts.

The counter of a budget is the sum of its rows (docs/reference/limits.md). So rows in BigQuery say
what a counter must be, of this month and of the one before. Only budgets that a plan or a key has
now are restored.

It may run while requests come in: amounts are added, never set. Of a request in flight the row may
be there, while Redis still counts a reservation. So a budget of which something is reserved is
compared with the rows of requests from SETTLED_S ago and before, which misses some, and one that
rests with all its rows. No counter gets above its rows so. Run again, it adds what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any, NamedTuple

from api.limits.accounts import LimitStore
from api.limits.counters import ROUNDING_USD, Ask, month_of
from shared.errors import ConfigurationError, PenstockError, Unavailable
from shared.reports.budgets import budgets_usd
from shared.settings import ApiSettings, read_settings
from shared.stores.key_stores import key_store
from shared.tenants.directory import Document, decode_document
from shared.usage.bigquery import open_client, run_query

QUERY_LIMIT_S = 120.0
REDIS_LIMIT_S = 5.0
MAX_LINES = 1_000_000
MAX_GIB = 20.0
GIB = 1024**3
SETTLED_S = 3600.0
"""After this time a request has ended."""


class Spent(NamedTuple):
    """What the rows of a key say of a month. Without a key, requests needed none."""

    tenant: str
    key_id: str | None
    month: int
    """In months since January of the year 0, as `month_of` counts."""
    usd: float
    settled_usd: float
    """The part of requests from SETTLED_S ago and before."""


class RowSums(NamedTuple):
    """What rows say of a counter, in US dollars: in all, and of requests that have ended."""

    usd: float
    settled_usd: float


class Restored(NamedTuple):
    """One counter of a month, before and after."""

    name: str
    """`t:TENANT:usd`, or `k:TENANT:KEY_ID:usd`."""
    month: int
    counted_usd: float
    """In Redis, without what requests in flight have reserved."""
    rows_usd: float
    is_busy: bool
    """True if requests in flight have reserved some of it, so only settled rows are compared."""

    @property
    def missing_usd(self) -> float:
        """Negative: more is counted than rows say."""
        return self.rows_usd - self.counted_usd

    def is_changed(self, *, lowers: bool) -> bool:
        """Returns whether it is brought to what rows say."""
        return self.missing_usd > 0 or (lowers and not self.is_busy)


def sums_by_counter(
    document: Document, spent: Sequence[Spent], months: Sequence[int]
) -> dict[tuple[str, int], RowSums]:
    """What each counter of a budget must have counted, by its name and month.

    Args:
        document: the directory of keys. Its plans and keys say which budgets there are.
        spent: the sums of rows.
        months: which to return, those without rows too.
    """
    names: dict[tuple[str, str | None], str] = {
        (tenant, None): f"t:{tenant}:usd" for tenant in budgets_usd(document)
    }
    for key in document.keys:
        if key.limits is not None and key.limits.budget_usd_per_month is not None:
            names[key.tenant, key.id] = f"k:{key.tenant}:{key.id}:usd"
    sums = {(name, month): RowSums(0.0, 0.0) for name in names.values() for month in months}
    for one in spent:
        for holder in {None, one.key_id}:
            place = names.get((one.tenant, holder), ""), one.month
            if (before := sums.get(place)) is not None:
                total = before.usd + one.usd, before.settled_usd + one.settled_usd
                sums[place] = RowSums(*total)
    return sums


async def restore(
    store: LimitStore,
    sums: Mapping[tuple[str, int], RowSums],
    *,
    lowers: bool = False,
    writes: bool = True,
) -> list[Restored]:
    """Adds to the counters of budgets what rows say and Redis does not.

    Args:
        store: the counts in Redis.
        sums: by counter and month, what rows say.
        lowers: a counter above its rows is lowered as well. Only if no request is in flight, and
            all rows have arrived.
        writes: False only compares.

    Returns the counters that differ.

    Raises:
        Unavailable: Redis did not answer. What was changed before stays changed.
    """
    changed = []
    for (name, month), of_rows in sorted(sums.items()):
        [answer] = await store.take([_ask(name, month)])
        if int(answer.period) != month:
            continue  # Redis counts a later month, and no longer knows this one
        is_busy = answer.held > ROUNDING_USD
        usd = of_rows.settled_usd if is_busy else of_rows.usd
        one = Restored(name, month, answer.used - answer.held, usd, is_busy)
        if abs(one.missing_usd) <= ROUNDING_USD:
            continue
        changed.append(one)
        if writes and one.is_changed(lowers=lowers):
            await store.take([_ask(name, month, [(float(month), -one.missing_usd)])])
    return changed


def _ask(name: str, month: int, returns: list[tuple[float, float]] | None = None) -> Ask:
    """Asks for nothing of a budget: its limit does not matter."""
    return Ask(name, "month", limit=sys.float_info.max, need=0, month=month, returns=returns or [])


def read_spent(
    settings: ApiSettings,
    tenants: Sequence[str],
    since: datetime,
    settled: datetime,
    max_bytes: int,
) -> list[Spent]:
    """Returns what rows say of some tenants, by key and month.

    Args:
        settings: the project, the dataset and the endpoint of BigQuery.
        tenants: whose rows are added up.
        since: the first time at which a request counts.
        settled: requests from before then have ended.
        max_bytes: a query that would read more is refused.

    Raises:
        Unavailable: BigQuery is out of reach, or refused, or has more lines than MAX_LINES.
    """
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.bigquery import ArrayQueryParameter, QueryJobConfig, ScalarQueryParameter
    from requests.exceptions import RequestException

    sql = resources.files("api.limits").joinpath("spent.sql").read_text(encoding="utf-8")
    parameters: list[Any] = [
        ScalarQueryParameter("since", "TIMESTAMP", since),
        ScalarQueryParameter("settled", "TIMESTAMP", settled),
        ArrayQueryParameter("tenants", "STRING", list(tenants)),
        ScalarQueryParameter("most", "INT64", MAX_LINES + 1),
    ]
    config = QueryJobConfig(
        default_dataset=f"{settings.project}.{settings.dataset}",
        maximum_bytes_billed=max_bytes,
        query_parameters=parameters,
    )
    try:
        client = open_client(settings.project, settings.bigquery_endpoint)
        _, result = run_query(client, sql, config, QUERY_LIMIT_S)
        spent = [Spent(*row.values()) for row in result]
    except (GoogleAPIError, GoogleAuthError, RequestException, TimeoutError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise Unavailable(f"the rows can't be read now: {reason}") from error
    if len(spent) > MAX_LINES:
        raise Unavailable(f"there are sums of more than {MAX_LINES} keys")
    return spent


def main(words: Sequence[str] | None = None) -> int:
    """Restores the budgets of the deployment that PENSTOCK_* name. Returns the exit status."""
    arguments = _parser().parse_args(words)
    try:
        settings = read_settings(ApiSettings)
        changed = asyncio.run(_run(settings, arguments))
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1
    for one in changed:
        _show(one, lowers=arguments.lower, writes=not arguments.dry_run)
    if not changed:
        print("all budgets are as their rows say")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock budgets restore",
        description="Counts again, from the rows in BigQuery, what is spent of all budgets. For a "
        "Redis that lost its counts. Run it once more when the rows of the last minutes are there.",
    )
    parser.add_argument("--dry-run", action="store_true", help="compare, and change nothing")
    parser.add_argument(
        "--lower",
        action="store_true",
        help="lower counters that are above their rows, too; only while no requests come",
    )
    parser.add_argument(
        "--max-gib", type=float, default=MAX_GIB, help="GiB that the query may read (20)"
    )
    return parser


async def _run(settings: ApiSettings, arguments: argparse.Namespace) -> list[Restored]:
    if not settings.keys_url:
        raise ConfigurationError(
            "PENSTOCK_KEYS_URL is not set, so no tenant has a budget", field="keys_url"
        )
    async with key_store(settings.keys_url) as keys:
        stored = await keys.read()
        assert stored is not None, "without a version it is always read; this is a bug"
        document = decode_document(stored.data, keys.source)
    now_s = time.time()
    month, settled = int(month_of(now_s)), datetime.fromtimestamp(now_s - SETTLED_S, UTC)
    since = datetime((month - 1) // 12, (month - 1) % 12 + 1, 1, tzinfo=UTC)
    tenants = sorted({*budgets_usd(document), *(key.tenant for key in document.keys)})
    spent = await asyncio.to_thread(
        read_spent, settings, tenants, since, settled, int(arguments.max_gib * GIB)
    )
    sums = sums_by_counter(document, spent, (month - 1, month))
    instance = f"restore-{secrets.token_hex(4)}"
    store = LimitStore(settings.records_redis_url, instance, timeout_s=REDIS_LIMIT_S)
    async with store:
        return await restore(store, sums, lowers=arguments.lower, writes=not arguments.dry_run)


def _show(one: Restored, *, lowers: bool, writes: bool) -> None:
    year, month = divmod(one.month, 12)
    said = "above its rows, kept"
    if one.is_changed(lowers=lowers):
        said = "restored" if writes else "to be restored"
    if one.is_busy:
        said += " (in use: run again)"
    print(
        f"{one.name.removesuffix(':usd')} {year}-{month + 1:02}: counted "
        f"${one.counted_usd:.6f}, rows ${one.rows_usd:.6f}: {said}"
    )


if __name__ == "__main__":
    sys.exit(main())
