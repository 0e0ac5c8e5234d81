"""Publishes the job of a prediction, once its record exists."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from api import metrics
from api.dispatch.job_sender import ReplyWaiter, build_envelope, encode_message, publish_span
from api.dispatch.model_window import BATCHES_HELD
from api.dispatch.request import RequestOptions
from api.fair_room import Demand
from shared.canary.forwarding import JobMessage, publish_job
from shared.catalog import Model
from shared.catalog_entry import Replies
from shared.errors import Overloaded, PenstockError, Unavailable
from shared.messages import Envelope, Item, ItemError, ReplyBody, encode_reply_body
from shared.predictions import Prediction
from shared.stores.records import Records
from shared.topics import jobs_topic_id
from shared.transport import Publisher
from shared.webhook_publisher import WebhookPublisher

PUBLISH_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class NewPrediction:
    """A prediction to create, and its job."""

    prediction: Prediction
    items: Sequence[Item]
    options: RequestOptions
    reply_bytes: int
    """The largest size of its reply."""
    replies: Replies
    """The reply topic of an inbox, by the model's entry."""
    weight: float
    """The tenant's share of a busy model, from its plan."""
    plan: str
    """The name of that plan, for rows."""
    keep_s: int | None
    """How long it is stored after its end, by the tenant's plan. None: the default."""
    is_keyed: bool
    """True if the caller can repeat the request and get the same prediction."""
    is_promised: bool
    """True if the SLO applies to it."""

    @property
    def demand(self) -> Demand:
        """Returns its demand on the workers."""
        given = self.prediction
        return Demand(
            given.model,
            len(self.items),
            given.tenant,
            self.weight,
            self.options.lane,
            self.is_promised,
        )


class PredictionSender:
    """Publishes predictions. Has no state between calls."""

    def __init__(
        self, records: Records, publisher: Publisher, models: Iterable[Model], api_instance: str
    ) -> None:
        self._records = records
        self._most_interactive = {
            model.name: BATCHES_HELD * model.batch.max_items for model in models
        }
        self._publisher = publisher
        self._api_instance = api_instance
        self.webhooks = WebhookPublisher(publisher)

    async def send(
        self, new: NewPrediction, waiter: ReplyWaiter | None, *, unfinished: int = 0
    ) -> None:
        """Publishes the job of a prediction whose record exists, and marks the record as published.

        No publish window holds predictions back: they are durable, so they must not end with this
        instance. Instead, further ones of a tenant with many unfinished predictions go to the batch
        lane, where they do not precede interactive requests of others.

        Args:
            new: the prediction to publish.
            waiter: receives the reply.
            unfinished: number of predictions of the tenant that have not ended, as far as known.

        Raises:
            Overloaded: the broker is full.
            Unavailable: the broker is out of reach. A record without a key was ended as failed.
        """
        prediction, now_s = new.prediction, time.time()
        model = prediction.canary or prediction.model
        topic_id = jobs_topic_id(model)
        try:
            with publish_span(topic_id, items=len(new.items), started_s=now_s):
                envelope = self._envelope(new, waiter, now_s)
                if unfinished > self._most_interactive[prediction.model]:
                    envelope.lane = "batch"
                message = encode_message(envelope, new.items, new.options)
                await publish_job(
                    self._publisher, JobMessage(model, *message), timeout_s=PUBLISH_LIMIT_S
                )
        except PenstockError as error:
            await self._give_up(new, error)
        # Without the mark, a repeated request publishes the job again, which is harmless.
        with suppress(Unavailable):
            await self._records.mark_published(prediction.record)

    def _envelope(
        self, new: NewPrediction, waiter: ReplyWaiter | None, published_at_s: float
    ) -> Envelope:
        prediction = new.prediction
        envelope = build_envelope(
            request_id=prediction.record,
            client_request_id=prediction.client_request_id,
            model=prediction.canary or prediction.model,
            tenant=prediction.tenant,
            key_id=prediction.key_id,
            plan=new.plan,
            price_share=1.0 if prediction.price is None else prediction.price.price_share,
            weight=new.weight,
            received_at_s=prediction.created_at_s,
            deadline_s=prediction.deadline_s,
            options=new.options,
            api_instance=self._api_instance,
        )
        envelope.prediction, envelope.webhook = "1", ",".join(prediction.webhook_events)
        envelope.published_at_s = published_at_s
        if waiter is not None:
            envelope.inbox, envelope.slot = waiter.inbox, waiter.slot
        return envelope

    async def _give_up(self, new: NewPrediction, error: PenstockError) -> NoReturn:
        """Ends a prediction that was not published, unless the caller can repeat the request."""
        metrics.PREDICTIONS.labels(new.prediction.model, "refused").inc()
        if not new.is_keyed:
            reply = failed_reply("unavailable", error.public_message)
            await self._records.finish(new.prediction.record, "failed", reply)
        if isinstance(error, Overloaded):
            raise error
        raise Unavailable(f"the broker did not take the prediction: {error.message}") from error


def failed_reply(code: str, message: str) -> bytes:
    """Returns the reply for a record that no worker ended, with a code of shared.errors."""
    return encode_reply_body(ReplyBody([], ItemError(code, message), replied_at_s=time.time()))
