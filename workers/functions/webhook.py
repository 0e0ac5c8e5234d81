"""Sends events to webhooks by posting the same body that GET returns, signed, once per push.

Pub/Sub retries failed deliveries every 5 to 600 s for a day, with the same `webhook-id`. A 2xx
stops the retries. A 410 stops all further events for the prediction. Other 4xx responses and
redirects are retried for an hour after the first one. None of this changes the prediction's record.

If a prediction was deleted before its completion was reported, the final event has no input or
output, and earlier events are dropped.

Batch completions and budget warnings are sent as events in OpenAI's format. Their messages contain
everything needed to send them. They are retried like other webhooks.

The URL is chosen by the caller, so it must not reach internal addresses
(shared/web/pinned_http.py).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import ClientError, ClientResponse, ClientTimeout
from prometheus_client import Counter

from shared.broker.transport import ReceivedMessage
from shared.errors import MALFORMED, PenstockError, Unavailable, UndecodableMessage
from shared.predictions import (
    Prediction,
    body_of,
    decode_document,
    decode_end,
    read_partial,
)
from shared.stores.objects import UrlSigner
from shared.stores.record_state import Record
from shared.stores.records import Records
from shared.stores.token_streams import TokenStreams
from shared.stores.webhook_log import WebhookAttempt, WebhookLog
from shared.tracing.spans import STAGE, Attributes, current, read_attributes, span
from shared.usage.webhook_delivery import WebhookDelivery
from shared.web.pinned_http import CONNECT_LIMIT_S, Resolve, open_pinned_session, resolve
from shared.web.public_url import ANYWHERE, PUBLIC, UrlForbidden
from shared.webhooks.event import (
    BUDGET_WARNING,
    BatchEvent,
    BudgetEvent,
    WebhookEvent,
    WebhookUrlForbidden,
    decode_batch_event,
    decode_budget_event,
    decode_webhook_event,
    parse_webhook_url,
    signature,
    tenant_secrets,
)
from workers.functions.deliveries import Deliveries, DeliveryState
from workers.functions.receiver_permits import ReceiverBusy, ReceiverPermits, Turn

TOTAL_LIMIT_S = 20.0
READ_BYTES = 1024
"""Maximum length of a logged response. Only the status matters."""

GONE = 410
"""Status a receiver returns to shut off its webhook. The event is not sent again."""
WORTH_RETRYING = frozenset({408, 425, 429})
"""4xx statuses after which a later attempt may succeed."""
REFUSED_LIMIT_S = 3600.0
"""How long a rejected event is retried: about a dozen attempts at growing intervals."""
WORDS_LOGGED = 200
REDIRECTED = (
    "the receiver responded with a redirect, which webhooks do not follow; set the "
    "webhook to the URL that it redirects to"
)
T = TypeVar("T")

WEBHOOKS = Counter(
    "penstock_functions_webhooks_total",
    "Webhook events, by the result of this push",
    ["event", "end"],
)

ATTRIBUTES = frozenset({"batch", "budget"})
"""A message with one of these attributes contains an event in OpenAI's format."""

log = logging.getLogger(__name__)


class WebhookResponse(NamedTuple):
    """A receiver's response: its status and the start of its body."""

    status: int
    words: str

    @property
    def is_redirect(self) -> bool:
        """True if the receiver responded with a redirect. Webhooks follow no redirects."""
        return 300 <= self.status < 400


class WebhookClient:
    """Posts to one webhook.

    Args:
        allow_private: if True, any address and plain http are allowed, for use on a single machine.
        resolve: returns all addresses of a host and port.
    """

    def __init__(
        self, url: str, *, allow_private: bool = False, resolve: Resolve = resolve
    ) -> None:
        self._url = url
        self._allow_private = allow_private
        self._resolve = resolve

    async def post(self, headers: Mapping[str, str], body: bytes) -> WebhookResponse:
        """Posts once, without following redirects.

        Raises:
            WebhookUrlForbidden: the URL is not allowed for webhooks, or one of its addresses is not
                public.
            Unavailable: the receiver did not respond in time.
        """
        url = parse_webhook_url(self._url, allow_private=self._allow_private)
        reach = ANYWHERE if self._allow_private else PUBLIC
        timeout = ClientTimeout(total=TOTAL_LIMIT_S, connect=CONNECT_LIMIT_S)
        try:
            async with (
                open_pinned_session(url, reach, timeout, resolve=self._resolve) as session,
                session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                return WebhookResponse(answer.status, await _first_words(answer))
        except UrlForbidden as error:
            raise WebhookUrlForbidden(error.message, field="webhook") from error
        except (ClientError, OSError, ValueError) as error:
            # aiohttp's own timeouts raise TimeoutError, which is an OSError.
            reason = f"{url.host}: {str(error) or type(error).__name__}"
            raise Unavailable(reason, public=reason) from error  # about the caller's own receiver


async def _first_words(answer: ClientResponse) -> str:
    """Returns the start of a failed response's body, or an empty string after a success."""
    if answer.ok:
        return ""
    try:
        return (await answer.content.read(READ_BYTES)).decode(errors="replace")
    except (ClientError, OSError):
        return ""


class Webhooks:
    """Delivers events."""

    def __init__(
        self,
        records: Records,
        tokens: TokenStreams,
        webhook_log: WebhookLog,
        delivery_state: DeliveryState,
        url_signer: UrlSigner,
        secrets: str,
        deliveries: Deliveries,
        turns: ReceiverPermits,
        *,
        allow_private: bool,
    ) -> None:
        self._records = records
        self._tokens = tokens
        self._webhook_log = webhook_log
        self._turns = turns
        self._deliveries = deliveries
        self._delivery_state = delivery_state
        self._url_signer = url_signer
        self._secrets = secrets
        self._allow_private = allow_private

    async def deliver(self, message: ReceivedMessage) -> None:
        """Delivers one message's event if it is due and the webhook still wants it.

        Raises:
            UndecodableMessage: the message is not a webhook event.
            PenstockError: the delivery failed and should be retried.
        """
        event = decode_webhook_event(message.data)
        facts: Attributes = {
            STAGE: "webhook",
            "http.request.method": "POST",
            "penstock.request_id": event.id,
            "penstock.webhook.event": event.event,
        }
        parent = read_attributes(message.attributes)
        with span("POST webhook", "client", facts, parent=parent) as delivery:
            end = "failed"
            try:
                end = await self._deliver(event, message)
            except ReceiverBusy:
                end = "deferred"
                raise
            finally:
                WEBHOOKS.labels(event.event, end).inc()
                delivery.set({"penstock.webhook.end": end})
            log.info("webhook", extra={"record": event.id, "event": event.event, "end": end})

    async def _deliver(self, event: WebhookEvent, message: ReceivedMessage) -> str:
        snapshot = await self._find(event)
        if isinstance(snapshot, str):
            return snapshot
        prediction, record = snapshot
        if not prediction.webhook or event.event not in prediction.webhook_events:
            return "unwanted"
        if event.event == "completed" and not record.is_over:
            raise Unavailable("the prediction has not finished yet")
        async with self._turns.hold_turn(prediction.tenant, prediction.webhook) as turn:
            return await self._deliver_now(event, message, prediction, record, turn)

    async def _deliver_now(
        self,
        event: WebhookEvent,
        message: ReceivedMessage,
        prediction: Prediction,
        record: Record,
        turn: Turn,
    ) -> str:
        if not event.is_replay:
            decision = await self._delivery_state.admit(event.id, event.event)
            if decision != "due":
                return decision
        delivery = WebhookDelivery(
            delivery_id=_webhook_id(event, message),
            request_id=prediction.record,
            tenant=prediction.tenant,
            model=prediction.model,
            event=event.event,
            published_at_s=message.publish_time_s or None,
        )
        try:
            async with self._deliveries.record(delivery):
                answer = await self._post_and_log(prediction, record, delivery, turn)
                delivery.note_answer(answer.status)
                end = await end_of(answer, message, delivery.delivery_id, self._delivery_state)
                delivery.outcome = end
        except WebhookUrlForbidden as error:
            log.warning("webhook forbidden", extra={"record": event.id, "reason": error.message})
            return "forbidden"
        if end == "gone" or (end == "delivered" and event.event == "completed"):
            await self._delivery_state.close(event.id)
            await self._webhook_log.drop_end(event.id)
        return end

    async def _find(self, event: WebhookEvent) -> tuple[Prediction, Record] | str:
        """Returns the event's prediction, or the reason there is nothing to report."""
        record = await self._records.read(event.id)
        if record is not None and record.document:
            return _decode_or_reject(decode_document, record.document), record
        end = await self._webhook_log.end_of(event.id)
        if end is not None and event.event == "completed":
            return _decode_or_reject(decode_end, end)
        return "no_record" if record is None else "deleted"

    async def _post_and_log(
        self, prediction: Prediction, record: Record, delivery: WebhookDelivery, turn: Turn
    ) -> WebhookResponse:
        """Posts the event and logs the result.

        The receiver's response is not written to any log that a caller can read.
        """
        attempt = WebhookAttempt(
            webhook_id=delivery.delivery_id, event=delivery.event, at_s=time.time(), duration_s=0.0
        )
        try:
            answer = await self._post(prediction, record, delivery.delivery_id, turn)
            attempt.status = answer.status
            if answer.is_redirect:
                attempt.error = REDIRECTED
        except PenstockError as error:
            attempt.error = error.public_message
            raise
        finally:
            attempt.duration_s = round(time.time() - attempt.at_s, 6)
            delivery.attempt = await self._webhook_log.add(prediction.record, attempt)
        return answer

    async def _post(
        self, prediction: Prediction, record: Record, webhook_id: str, turn: Turn
    ) -> WebhookResponse:
        partial = await read_partial(prediction, record, self._tokens, self._url_signer)
        is_deleted = not record.document
        prediction_body = body_of(
            prediction, record, self._url_signer, partial=partial, is_deleted=is_deleted
        )
        body = msgspec.json.encode(prediction_body)
        headers = sign_headers(self._secrets, prediction.tenant, webhook_id, body)
        client = WebhookClient(prediction.webhook, allow_private=self._allow_private)
        with turn.posting():
            return await client.post(headers, body)


def _decode_or_reject(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except MALFORMED as error:
        raise UndecodableMessage(
            f"the record does not contain a prediction: {error}", field="document"
        ) from error


def _webhook_id(event: WebhookEvent, message: ReceivedMessage) -> str:
    """Returns an ID that is the same for every push of one event.

    Start and completion events occur only once per prediction. Other events have a number or a
    message.
    """
    which = (
        "" if event.event in ("start", "completed") else str(event.sequence or message.message_id)
    )
    return "msg_" + hashlib.sha256(f"{event.id}\n{event.event}\n{which}".encode()).hexdigest()[:32]


def sign_headers(setting: str, tenant: str, webhook_id: str, body: bytes) -> dict[str, str]:
    """Returns a delivery's headers as defined by Standard Webhooks.

    Args:
        setting: the secrets, in the format used by shared.webhooks.event.tenant_secrets.
        webhook_id: ID that is the same for every attempt to deliver one event.
    """
    now_s = int(time.time())
    headers = {
        "content-type": "application/json",
        "user-agent": "Penstock-Webhooks/1",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(now_s),
        "webhook-signature": signature(tenant_secrets(setting, tenant), webhook_id, now_s, body),
    }
    if (trace := current()) is not None:
        headers["traceparent"] = trace.traceparent
    return headers


async def end_of(
    answer: WebhookResponse, message: ReceivedMessage, delivery_id: str, state: DeliveryState
) -> str:
    """Returns the outcome for an event's message, based on the receiver's response to the event.

    A rejected event's hour of retries starts with its first rejection. Time spent waiting before
    that does not count.

    Args:
        delivery_id: ID that is the same for every attempt.
        state: stores the first rejection.

    Raises:
        Unavailable: the delivery should be retried.
    """
    if 200 <= answer.status < 300:
        return "delivered"
    if answer.status == GONE:
        return "gone"
    is_refusal = 300 <= answer.status < 500 and answer.status not in WORTH_RETRYING
    if is_refusal:
        now_s = time.time()
        first_s = (
            await state.read_refused_since(delivery_id, now_s) or message.publish_time_s or now_s
        )
        if now_s - first_s > REFUSED_LIMIT_S:
            return "refused"
    why = REDIRECTED if answer.is_redirect else answer.words[:WORDS_LOGGED]
    raise Unavailable(f"the receiver returned {answer.status}: {why}")


class _Notice(NamedTuple):
    """The body sent to the receiver."""

    kind: str
    identity: str
    """It is the same each time the event is published, so the event's ID is the same too."""
    data: dict[str, Any]
    facts: dict[str, str]
    """Fields for log entries."""


class EventWebhooks:
    """Delivers batch and budget events."""

    def __init__(
        self,
        secrets: str,
        deliveries: Deliveries,
        delivery_state: DeliveryState,
        turns: ReceiverPermits,
        *,
        allow_private: bool,
    ) -> None:
        self._secrets = secrets
        self._delivery_state = delivery_state
        self._turns = turns
        self._deliveries = deliveries
        self._allow_private = allow_private

    async def deliver(self, message: ReceivedMessage) -> None:
        """Delivers one message's event.

        Raises:
            UndecodableMessage: the message contains no such event.
            PenstockError: the delivery failed and should be retried.
        """
        event: BatchEvent | BudgetEvent
        if "batch" in message.attributes:
            event = decode_batch_event(message.data)
            notice = _notice_of_batch(event)
        else:
            event = decode_budget_event(message.data)
            notice = _notice_of_budget(event)
        end = "failed"
        try:
            async with self._turns.hold_turn(event.tenant, event.url) as turn:
                end = await self._post(event, notice, message, turn)
        except ReceiverBusy:
            end = "deferred"
            raise
        finally:
            WEBHOOKS.labels(notice.kind, end).inc()
        log.info("webhook", extra={**notice.facts, "event": notice.kind, "end": end})

    async def _post(
        self, event: BatchEvent | BudgetEvent, notice: _Notice, message: ReceivedMessage, turn: Turn
    ) -> str:
        event_id = "evt_" + hashlib.sha256(notice.identity.encode()).hexdigest()[:32]
        body = msgspec.json.encode(
            {
                "id": event_id,
                "object": "event",
                "created_at": int(event.created_at_s),
                "type": notice.kind,
                "data": notice.data,
            }
        )
        headers = sign_headers(self._secrets, event.tenant, event_id, body)
        delivery = WebhookDelivery(
            delivery_id=event_id,
            batch_id=notice.facts.get("batch"),
            tenant=event.tenant,
            event=notice.kind,
            published_at_s=message.publish_time_s or None,
        )
        try:
            async with self._deliveries.record(delivery):
                client = WebhookClient(event.url, allow_private=self._allow_private)
                with turn.posting():
                    answer = await client.post(headers, body)
                delivery.note_answer(answer.status)
                end = await end_of(answer, message, event_id, self._delivery_state)
                delivery.outcome = end
            return end
        except WebhookUrlForbidden as error:
            log.warning("webhook forbidden", extra={**notice.facts, "reason": error.message})
            return "forbidden"


def _notice_of_batch(event: BatchEvent) -> _Notice:
    identity = f"{event.batch}\n{event.event}"
    return _Notice(event.event, identity, {"id": event.batch}, {"batch": event.batch})


def _notice_of_budget(event: BudgetEvent) -> _Notice:
    data = {
        "tenant": event.tenant,
        "api_key_id": event.key_id or None,
        "month": event.month,
        "share": event.share,
        "budget_usd": event.budget_usd,
        "spent_usd": event.spent_usd,
    }
    identity = f"{event.tenant}\n{event.key_id}\n{event.month}\n{event.share}"
    return _Notice(BUDGET_WARNING, identity, data, {"tenant": event.tenant})
