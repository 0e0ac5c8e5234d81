"""One request while the dispatcher works on it: its items, the jobs it started, and what has landed so far."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from api.dispatch.request import Answer, InferenceRequest
from api.dispatch.singleflight import Flight, JobInFlight, Landing
from shared.errors import PenstockError, UndecodableMessage
from shared.messages import Item, ItemOutcome, Receipt, failure
from shared.stores.cache import cache_key
from shared.tasks import Result


class Asking:
    """A request and its state; plain data, no I/O.

    Raises:
        BadInput: an input has no canonical form.
    """

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        model = request.model
        keeps = request.is_repeatable and model.cache.ttl_s > 0 and (request.cache_read or request.cache_write)
        self.items = [
            Item(index, given, cache_key(model, given, request.tenant) if keeps else None)
            for index, given in enumerate(request.inputs)
        ]
        self.joins = request.cache_read and request.cache_write
        """A caller who wants nothing stored, or nothing older than the request, shares with nobody."""
        self.landings: list[Landing | None] = [None] * len(self.items)
        self._jobs: list[JobInFlight] = []

    def waiting(self) -> list[int]:
        """The items that have no outcome yet, by index."""
        return [index for index, landing in enumerate(self.landings) if landing is None]

    def remaining_s(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self.request.deadline_s - time.time())

    def new_job(self, flights: Sequence[Flight]) -> JobInFlight:
        """Puts flights into a job, with a part number that this request has not used."""
        job = JobInFlight(list(flights), len(self._jobs), self.request.deadline_s)
        for flight in flights:
            flight.job = job
        self._jobs.append(job)
        return job

    def take(self, index: int, flight: Flight, *, leads: bool) -> None:
        """Takes over how the flight landed; leaves the item open where asking again may still help."""
        landing = flight.landed.result() if flight.landed.done() else None
        is_over = landing is not None and (leads or not _is_of_leader(landing.outcome))
        if not is_over and self.remaining_s() > 0:
            return
        if landing is None or not is_over:
            was_published = leads and flight.job is not None and flight.job.published_at_s > 0
            landing = Landing(failure(index, self.request.too_late()), was_published)
        elif not leads:
            landing = Landing(_joined(index, landing.outcome), by_worker=False)
        self.landings[index] = landing

    def cancel(self, error: PenstockError) -> None:
        """Ends every open item with `error`; what the broker has is the worker's to record."""
        published = {flight.item.index for job in self._jobs if job.published_at_s for flight in job.flights}
        for index in self.waiting():
            self.landings[index] = Landing(failure(index, error), by_worker=index in published)

    def answer(self) -> Answer:
        """The outcomes, all there, in order."""
        landings = [landing for landing in self.landings if landing is not None]
        waits_ms = [
            (landing.outcome.receipt.pulled_at_s - landing.published_at_s) * 1000
            for landing in landings
            if landing.published_at_s and landing.outcome.receipt.pulled_at_s
        ]
        return Answer([landing.outcome for landing in landings], max(0.0, *waits_ms, 0.0))


def _is_of_leader(outcome: ItemOutcome) -> bool:
    """Whether an item failed for its leader alone: what was too late, or not to be read, may still do for others."""
    unreadable = outcome.error is not None and outcome.error.code == UndecodableMessage.code
    return outcome.status == "expired" or unreadable


def hit(item: Item, result: Result, level: str) -> ItemOutcome:
    """The outcome of an item that the cache level `level` answers."""
    return ItemOutcome(item.index, "succeeded", _shared(level, result), result)


def _joined(index: int, outcome: ItemOutcome) -> ItemOutcome:
    """Another's outcome as our own."""
    return msgspec.structs.replace(outcome, index=index, receipt=_shared("joined", outcome.result))


def _shared(cache: str, result: Result | None) -> Receipt:
    tokens, pixel_steps = getattr(result, "tokens", None), getattr(result, "pixel_steps", None)
    return Receipt(cache=cache, tokens=tokens, pixel_steps=pixel_steps)
