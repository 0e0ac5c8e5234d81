"""Redis budgets: a byte limit for each store whose entries Redis must not evict.

Predictions and responses stored for Idempotency-Keys must be kept, so they have no TTL, and a full
Redis doesn't evict them. Without a budget, one tenant could fill Redis. No tenant could then create
a prediction or use a key, and the cache would stay empty.

shared/stores/retention.lua contains the functions that these stores' scripts call. They count the
bytes of each tenant's entries. If a new entry does not fit, the largest tenant's oldest entry is
dropped. A tenant therefore never loses entries because another tenant sends more.

The counts are kept alongside the entries, not in them. If an entry is removed without its count (by
an operator, or by a release without budgets), the count is dropped later, when its turn comes.
"""

from __future__ import annotations

BUDGET_BYTES = 64 * 1024 * 1024
"""A quarter of the local stack's Redis: two such stores leave room for the cache and for Redis
itself.
"""
