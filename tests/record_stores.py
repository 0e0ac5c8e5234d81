"""The stores in the Redis that has the records, for tests that act as both API and worker."""

from __future__ import annotations

from typing import Self

from shared.stores.fetched_urls import FetchedUrls
from shared.stores.flow_runs import FlowRuns
from shared.stores.holds import Holds
from shared.stores.prediction_store import PredictionStore
from shared.stores.previews import PreviewStore
from shared.stores.records import Records
from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import KEY_PREFIX
from shared.stores.retention import BUDGET_BYTES
from shared.stores.token_streams import TokenStreams
from shared.stores.waiting_lines import WaitingLines
from shared.stores.webhook_log import WebhookLog
from tests.limits import REDIS_LIMIT_S


class RecordStores:
    """All the stores: an async context manager that opens and closes their connection."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = KEY_PREFIX,
        timeout_s: float = REDIS_LIMIT_S,
        retry_s: float = 0.25,
        max_bytes: int = BUDGET_BYTES,
    ) -> None:
        self.redis = RecordsRedis(url, prefix=prefix, timeout_s=timeout_s, retry_s=retry_s)
        self.records = Records(self.redis)
        self.predictions = PredictionStore(self.redis, max_bytes=max_bytes)
        self.fetched_urls = FetchedUrls(self.redis)
        self.flow_runs = FlowRuns(self.redis, max_bytes=max_bytes)
        self.holds = Holds(self.redis)
        self.lines = WaitingLines(self.redis)
        self.previews = PreviewStore(self.redis)
        self.tokens = TokenStreams(self.redis)
        self.webhook_log = WebhookLog(self.redis)

    async def __aenter__(self) -> Self:
        await self.redis.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.redis.__aexit__(*exc)
