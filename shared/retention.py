"""Budgets in Redis: a bound in bytes for each store whose entries Redis itself must not evict.

Answers kept for Idempotency-Keys and predictions are promised, so they have no TTL, and a full Redis evicts none of
them. Without a budget one tenant could fill Redis. Nobody could then create a prediction or use a key, and the cache
would stay empty.

The functions in shared/stores/retention.lua come before the scripts of such a store. They count the bytes of entries by
tenant. Where there is no room, the oldest entry of the largest tenant is dropped, so no tenant loses anything to
another one that sends more.

The counts are kept beside the entries, not in them. So an entry that is removed without them (by an operator, or by a
release without budgets) leaves a count that is dropped in its turn.
"""

from __future__ import annotations

BUDGET_BYTES = 64 * 1024 * 1024
"""A quarter of the local stack's Redis: two such stores leave room for the cache and for Redis itself."""
