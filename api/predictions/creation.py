"""A created prediction: its latest snapshot, and a way to wait for it to finish.

Also maps models in the catalog to owners and versions, as used by Replicate. Each model has one
version.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from api.dispatch.job_sender import LOOK_EVERY_S
from api.dispatch.reply_inbox import PendingReply
from shared.errors import (
    BadInput,
    Canceled,
    DeadlineExceeded,
    ModelFailed,
    PenstockError,
    UnknownModel,
    error_for_code,
)
from shared.messages import RequestFacts, reason_of
from shared.models.catalog import Catalog, Flow, Model
from shared.models.tasks.custom import streams_of
from shared.money.charge import price_of, step_prices_of
from shared.predictions import Prediction, record_of
from shared.stores.record_state import Record

log = logging.getLogger(__name__)

OWNER = "penstock"
"""The owner shown if the caller does not name one."""
_CLIENTS = re.compile(r"replicate[-/]", re.IGNORECASE)

POLL_S = 0.5
"""How often readers that get no reply, such as streams and repeated requests, read the record.
"""


def version_of(model: Model) -> str:
    """Returns a model's version ID: a 256-bit BLAKE2b digest of everything that affects results."""
    requested = model.requested
    facts = "\n".join((requested.name, requested.source, requested.revision, requested.precision))
    return hashlib.blake2b(facts.encode(), digest_size=32).hexdigest()


def new_prediction(
    model: Model, facts: RequestFacts, deadline_s: float, **shown: Any
) -> Prediction:
    """Returns the document of a new prediction.

    Args:
        facts: facts about the request. The record gets the same ID.
        deadline_s: Unix time at which work on the prediction stops.
        shown: other fields of the document.
    """
    priced = model, facts.received_at_s, facts.price_share
    known: dict[str, Any] = {
        "record": facts.request_id,
        "tenant": facts.tenant,
        "model": model.name,
        "owner": OWNER,
        "version": version_of(model),
        "created_at_s": facts.received_at_s,
        "deadline_s": deadline_s,
        "client_request_id": facts.client_request_id,
        "key_id": facts.key_id,
        "price": price_of(*priced),
        "streams": streams_of(model),
        "flow": model.plan.as_json() if isinstance(model, Flow) else None,
        "step_prices": step_prices_of(*priced),
    }
    return Prediction(**known | shown)


def find_version(catalog: Catalog, version: str) -> Model:
    """Finds a model by name or alias, with or without an owner, or by version ID.

    Raises:
        BadInput: no model has this name or version.
    """
    named, _, given_id = version.partition(":")
    name = given_id or named.rpartition("/")[2]
    try:
        return catalog.find(name)
    except UnknownModel as error:
        for model in catalog.served:
            if name == version_of(model):
                return model
        raise BadInput(f"version: {error.message}", field="version") from error


def ids_of(tenant: str, own_id: str, key: str) -> tuple[str, str]:
    """Returns the prediction ID and record ID: the caller's, an Idempotency-Key's, or new ones."""
    if own_id:
        return own_id, record_of(tenant, own_id)
    if key:
        digest = hashlib.blake2b(f"{tenant}\n{key}".encode(), digest_size=12)
        return f"pred_{digest.hexdigest()}", f"pred_{digest.hexdigest()}"
    prediction_id = f"pred_{secrets.token_hex(12)}"
    return prediction_id, prediction_id


def digest_of(text: str) -> str:
    """Returns the digest of a request."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def is_replicates_client(user_agent: str) -> bool:
    """Returns whether the user agent is a Replicate client, such as `replicate-python/1.0.7`.

    On paths that both use, nothing else distinguishes Replicate's clients from OpenAI's, because
    keys and hosts are the same here.
    """
    return _CLIENTS.match(user_agent) is not None


class PredictionSnapshot(NamedTuple):
    """A prediction and its record, as last read."""

    prediction: Prediction
    record: Record

    @property
    def is_unpublished(self) -> bool:
        """Returns whether the broker may be missing the job or one of a flow's first jobs."""
        is_open = self.record.state == "starting"
        if self.prediction.steps:
            is_open = not self.record.is_over
        return is_open and not self.record.published

    @property
    def failure(self) -> PenstockError:
        """The error, as sent by the worker, for a finished prediction that did not succeed."""
        if self.record.state == "canceled":
            return Canceled("the request was canceled")
        reply = self.record.reply
        if reply is not None and reply.error is not None:
            return error_for_code(reply.error.code, reply.error.message, reply.error.field)
        for outcome in reply.outcomes if reply is not None else ():
            if outcome.error is not None:
                error = outcome.error
                return error_for_code(error.code, reason_of(outcome), error.field)
        return ModelFailed("failed")

    @property
    def took_s(self) -> float | None:
        """How long the model took, in seconds. None if no model ran."""
        reply = self.record.reply
        outcomes = reply.outcomes if reply is not None else []
        times_ms = [
            outcome.receipt.inference_ms
            for outcome in outcomes
            if outcome.receipt.inference_ms is not None
        ]
        return max(times_ms) / 1000 if times_ms else None


Refresh = Callable[[PredictionSnapshot], Awaitable[PredictionSnapshot]]


class Creation:
    """A prediction that was created (`is_new`) or found, with its latest `snapshot`.

    Args:
        snapshot: the prediction, as created or found.
        waiter: receives the reply sent to this instance. If None, only the record shows that the
            prediction has finished.
        is_new: True if this request created the prediction.
    """

    def __init__(
        self,
        snapshot: PredictionSnapshot,
        refresh: Refresh,
        waiter: PendingReply | None,
        *,
        is_new: bool,
    ) -> None:
        self._refresh = refresh
        self._waiter = waiter
        self.snapshot = snapshot
        self.is_new = is_new

    async def wait(self, limit_s: float) -> None:
        """Waits up to `limit_s` for the prediction to finish. Updates `snapshot`."""
        # The limit includes reads, because a hung Redis must not delay the response.
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, limit_s)):
                pause_s = LOOK_EVERY_S
                while not self.snapshot.record.is_over:
                    await self._pause(pause_s)
                    known, self.snapshot = self.snapshot, await self._refresh(self.snapshot)
                    # If Redis is unavailable, the snapshot is unchanged, and the record still has
                    # to be read.
                    pause_s = POLL_S if self.snapshot is known else LOOK_EVERY_S

    async def _pause(self, limit_s: float) -> None:
        """Waits for the reply, which is sent only once, or for a change to the record.

        The record is read after `limit_s` in any case, because the reply may get lost.
        """
        try:
            if self._waiter is not None:
                await self._waiter.reply(limit_s)
                self._waiter = None
                return
        except DeadlineExceeded:
            return
        except PenstockError as error:
            log.debug("no reply will come", extra={"reason": error.message})
            self._waiter = None
        await asyncio.sleep(POLL_S)
