"""Hands jobs of a canary over to the other revision: what failed, and what takes too long.

So a caller gets the other revision's answer, and not the canary's error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shared.canary.forwarding import forward
from shared.catalog import Model
from shared.errors import PenstockError
from shared.messages import ItemOutcome
from shared.stores.records import Records
from shared.transport import Publisher
from workers import metrics
from workers.job import PulledJob
from workers.jobs.registry import JobRegistry

log = logging.getLogger(__name__)


class Forwarding:
    """Forwards jobs of one canary.

    Args:
        canary: the model of this worker.
        publisher: sends the jobs.
        records: lets their claims go.
        registry: holds the jobs.
    """

    def __init__(
        self, canary: Model, publisher: Publisher, records: Records, registry: JobRegistry
    ) -> None:
        self._canary = canary
        self._publisher = publisher
        self._records = records
        self._registry = registry

    @staticmethod
    def wants(outcomes: Sequence[ItemOutcome]) -> bool:
        """Whether the other revision is to try: an item failed, for whatever reason.

        A caller's mistake fails there too, in the words of the revision that callers know.
        """
        return any(outcome.status == "failed" for outcome in outcomes)

    def begin(self, pulled: PulledJob, reason: str) -> None:
        """Ends a job here and forwards it in the background. Not if it is over."""
        if not pulled.is_over:
            pulled.end()
            self._registry.spawn(self.forward(pulled, reason))

    async def forward(self, pulled: PulledJob, reason: str) -> None:
        """Forwards a job that was ended here, and acks it. Hands it back if that fails."""
        metrics.CANARY_FORWARDED.labels(reason).inc()
        try:
            # First, so that its death does not count against the next worker.
            await self._records.hand_over(pulled.record)
            await forward(self._publisher, self._canary.name, pulled.message)
        except PenstockError as error:
            facts = {"request_id": pulled.envelope.request_id, "reason": error.message}
            log.warning("job of a canary not forwarded", extra=facts)
            self._registry.hand_back(pulled)
            return
        self._registry.ack(pulled)
