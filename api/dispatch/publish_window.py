"""Lets jobs be published as workers get to them, so that no tenant fills a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from api.dispatch.demand import Demand
from api.dispatch.model_window import BATCHES_HELD, ModelWindow
from shared.catalog import Model
from shared.service_rate import ServiceRate

Key = tuple[str, str]
"""Model and lane."""


class PublishWindow:
    """The windows of all models and lanes.

    Args:
        models: the models of the catalog.
        rate_of: gives the service rate of a model.
        broker_wait_s: how long jobs may wait at the broker.
    """

    def __init__(
        self,
        models: Iterable[Model],
        rate_of: Callable[[str], ServiceRate],
        broker_wait_s: float,
    ) -> None:
        self._models = {model.name: model for model in models}
        self._rate_of = rate_of
        self._broker_wait_s = broker_wait_s
        self.of: dict[Key, ModelWindow] = {}
        """By model and lane. Only those that were used."""

    async def take(self, demand: Demand, until_s: float) -> None:
        """Takes a place for one job, which may be published then. Waits at most until `until_s`.

        Raises:
            DeadlineExceeded: the time (unix seconds) has passed. No place was taken.
        """
        await self.of_demand(demand).take(demand, until_s)

    def release(self, demand: Demand, *, is_in_topic: bool) -> None:
        """Gives the place of one job back.

        Args:
            demand: as taken.
            is_in_topic: whether it was published and nobody waits for its answer any more. Its
                place is kept for the time in which workers usually come to it. Otherwise a caller
                who hangs up again and again would fill the topic.
        """
        window = self.of_demand(demand)
        if is_in_topic:
            asyncio.get_running_loop().call_later(self._broker_wait_s, window.release, demand)
        else:
            window.release(demand)

    def of_demand(self, demand: Demand) -> ModelWindow:
        """The window that a job of this demand takes a place in."""
        key = (demand.model, demand.lane)
        window = self.of.get(key)
        if window is None:
            model = self._models[demand.model]
            window = self.of[key] = ModelWindow(
                self._rate_of(demand.model),
                BATCHES_HELD * model.batch.max_items,
                self._broker_wait_s,
                # A text may take minutes.
                is_guess_used=not model.definition.shares_weights,
            )
        return window
