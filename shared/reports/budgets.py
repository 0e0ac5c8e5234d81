"""The monthly budgets of tenants, as the directory of keys has them."""

from __future__ import annotations

from shared.stores.key_stores import key_store
from shared.tenants.directory import Document, decode_document, plan_of


async def read_budgets(keys_url: str) -> dict[str, float]:
    """The budgets of the directory that PENSTOCK_KEYS_URL names. None if it is empty.

    Raises:
        NoDirectory: there is none yet.
        Unavailable: the directory is unreachable.
        ConfigurationError: it is not valid.
    """
    if not keys_url:
        return {}
    async with key_store(keys_url) as store:
        stored = await store.read()
        assert stored is not None, "without a version it is always read; this is a bug"
        return budgets_usd(decode_document(stored.data, store.source))


def budgets_usd(document: Document) -> dict[str, float]:
    """Returns the budget of each tenant that has one, in US dollars per calendar month (UTC)."""
    budgets = {}
    for tenant in {*document.tenants, *(key.tenant for key in document.keys)}:
        if (budget_usd := plan_of(tenant, document).budget_usd_per_month) is not None:
            budgets[tenant] = budget_usd
    return budgets
