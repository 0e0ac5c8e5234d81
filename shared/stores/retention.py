"""Budgets in Redis: a limit in bytes for each store whose entries Redis must not evict.

Predictions and responses stored for Idempotency-Keys must be kept. So they have no TTL, and a full
Redis doesn't evict them. Without a budget, one tenant could fill Redis. Then no tenant could create
a prediction or use a key, and the cache would stay empty.

shared/stores/retention.lua has the functions called by scripts of such a store. They count the
bytes of entries by tenant. If a new entry does not fit, the oldest entry of the largest tenant is
dropped. So a tenant loses nothing to another that sends more.

The counts are kept next to the entries, not in them. If an entry is removed without its count (by
an operator, or by a release without budgets), the count is dropped later, in its turn.
"""

from __future__ import annotations

BUDGET_BYTES = 64 * 1024 * 1024
"""A quarter of the local stack's Redis: two such stores leave room for the cache and for Redis
itself.
"""
