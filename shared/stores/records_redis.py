"""The Redis that stores job records and everything that belongs to a record.

A single connection serves all of its stores: `Records`, `PredictionStore`, and the stores for flow
runs, holds, queues, tokens, previews, webhook attempts, and fetched URLs.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from shared.stores.redis_client import KEY_PREFIX, RedisLink

ERRORS = Counter(
    "penstock_records_errors_total",
    "Failed round trips to Redis about records, by operation.",
    ["operation"],
)
UP = Gauge(
    "penstock_records_redis_up",
    "1 while Redis is being asked about records, 0 while the breaker is open.",
)


class RecordsRedis(RedisLink):
    """The connection, with the keys used by several stores.

    Args:
        prefix: prefix for every key, so that several deployments can share one Redis.
        retry_s: upper bound on the first pause before a background retry.
    """

    def __init__(
        self, url: str, *, prefix: str = KEY_PREFIX, timeout_s: float = 1.0, retry_s: float = 0.25
    ) -> None:
        limits = {"timeout_s": timeout_s, "retry_s": retry_s}
        super().__init__(
            "records", url, **limits, up=UP, errors=ERRORS, field="records_url", checks_policy=True
        )
        self.prefix = prefix
        self.predictions_key = f"{prefix}predictions"
        """Prefix of the keys for the prediction budget, holds, and lists."""
        self.canceled_channel = f"{prefix}canceled"
        self.small_commands = self.commands("the prediction store")
        """For stores whose entries are small. They share round trips."""

    def record_key(self, record: str) -> str:
        return f"{self.prefix}record:{record}"
