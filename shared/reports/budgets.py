"""Tenants' monthly budgets, from the key directory."""

from __future__ import annotations

from shared.stores.key_stores import key_store
from shared.tenants.directory import Document, decode_document, plan_of


async def read_budgets(keys_url: str) -> dict[str, float]:
    """Returns the budgets from the directory at PENSTOCK_KEYS_URL. Empty if the setting is empty.

    Raises:
        NoDirectory: the directory does not exist yet.
        Unavailable: the directory is unreachable.
        ConfigurationError: the directory is invalid.
    """
    if not keys_url:
        return {}
    async with key_store(keys_url) as store:
        stored = await store.read()
        assert stored is not None, "read without a version, so it is always returned; this is a bug"
        return budgets_usd(decode_document(stored.data, store.source))


def budgets_usd(document: Document) -> dict[str, float]:
    """Returns each tenant's budget, if any, in US dollars per calendar month (UTC)."""
    budgets = {}
    for tenant in {*document.tenants, *(key.tenant for key in document.keys)}:
        if (budget_usd := plan_of(tenant, document).budget_usd_per_month) is not None:
            budgets[tenant] = budget_usd
    return budgets
