"""Reads running predictions' progress: queue positions, previews, and finished steps."""

from __future__ import annotations

from contextlib import suppress

from api.predictions.creation import PredictionSnapshot
from shared.errors import Unavailable
from shared.flows.engine import plan_of
from shared.flows.run import outcomes_after
from shared.messages import ItemOutcome
from shared.stores.flow_runs import FlowRuns
from shared.stores.previews import Preview, PreviewStore
from shared.stores.waiting_lines import QueuePosition, WaitingLines


class PredictionProgress:
    """All predictions' progress. The progress may be incomplete while Redis is not responding."""

    def __init__(self, lines: WaitingLines, previews: PreviewStore, runs: FlowRuns) -> None:
        self._lines = lines
        self._previews = previews
        self._runs = runs

    async def position(self, snapshot: PredictionSnapshot) -> QueuePosition | None:
        """Returns the queue position, or None if it isn't waiting or Redis is not responding."""
        prediction = snapshot.prediction
        if snapshot.record.state == "starting":
            with suppress(Unavailable):
                return await self._lines.position(
                    prediction.record, prediction.tenant, prediction.model, prediction.deadline_s
                )
        return None

    async def step_outcomes(
        self, snapshot: PredictionSnapshot, seen: int
    ) -> list[tuple[int, ItemOutcome]]:
        """Returns flow items completed after item number `seen`, numbered in order.

        Returns an empty list while Redis is not responding.
        """
        prediction, record = snapshot
        # A step may contain images that will be withheld.
        if not prediction.shows_steps:
            return []
        with suppress(Unavailable):
            reading = outcomes_after(
                self._runs,
                prediction.record,
                plan_of(prediction),
                seen,
                is_over=record.is_over,
            )
            return [numbered_outcome async for numbered_outcome in reading]
        return []

    async def previews(self, snapshot: PredictionSnapshot, cursor: str) -> list[Preview]:
        """Returns the previews after `cursor`, and requests more previews for the next few seconds.

        Returns an empty list while Redis is not responding.
        """
        if snapshot.prediction.is_checked:  # a preview may show an image that will be withheld
            return []
        record = snapshot.prediction.record
        with suppress(Unavailable):
            if not snapshot.record.is_over:
                await self._previews.watch(record)
            return await self._previews.after(record, cursor)
        return []
