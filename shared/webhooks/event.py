"""The message for a webhook event, and the signature used when it is delivered.

Signatures follow Standard Webhooks (https://www.standardwebhooks.com). The OpenAI, Replicate, and
Svix clients verify them. Each tenant's secret is derived from the setting, so that no tenant can
sign on behalf of another.

A webhook's URL is checked here for the API and the delivering function (shared/web/public_url.py).
The function also checks the host's addresses when it connects (shared/web/pinned_http.py).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
from yarl import URL

from shared.errors import MALFORMED, BadInput, ConfigurationError, UndecodableMessage
from shared.web.public_url import ANYWHERE, PUBLIC, UrlForbidden, parse_public_url

EventName = Literal["start", "output", "logs", "completed"]
BUDGET_WARNING = "budget.warning"
PREFIX = "whsec_"
MIN_KEY_BYTES = 24
"""The minimum key size that Standard Webhooks requires."""


class WebhookUrlForbidden(BadInput):
    """The URL leads to a destination that is forbidden for webhooks."""

    code = "webhook_forbidden"


def parse_webhook_url(text: str, *, allow_private: bool) -> URL:
    """Parses and checks a webhook URL.

    Args:
        text: URL as sent by the caller.
        allow_private: True to allow any address and http, for use on a single machine.

    Raises:
        WebhookUrlForbidden: webhooks are not delivered to this URL, whatever its host resolves to.
    """
    try:
        return parse_public_url(text, ANYWHERE if allow_private else PUBLIC)
    except UrlForbidden as error:
        raise WebhookUrlForbidden(error.message, field="webhook") from error


class WebhookEvent(msgspec.Struct, omit_defaults=True):
    """A message on the `webhooks` topic: an event for the prediction whose record is `id`.

    `sequence` numbers events with the same name, and is 0 for other events.
    """

    id: str
    event: EventName
    sequence: int = 0
    is_replay: bool = False
    """True if the caller requested the event again, in which case it is sent even if already
    delivered.
    """


class BatchEvent(msgspec.Struct):
    """A message on the `webhooks` topic: a batch has finished.

    Contains everything needed for delivery.
    """

    batch: str
    tenant: str
    url: str
    event: Literal["batch.completed", "batch.failed", "batch.cancelled", "batch.expired"]
    created_at_s: float
    """Unix time when the batch finished."""


class BudgetEvent(msgspec.Struct):
    """A message on the `webhooks` topic: a share of a monthly budget has been spent."""

    tenant: str
    key_id: str
    """The key that the budget belongs to. Empty for the tenant's budget."""
    url: str
    month: str
    """The month in UTC, such as `2026-11`."""
    share: float
    """The share of the budget at which the tenant wants to be notified."""
    budget_usd: float
    spent_usd: float
    """The amount spent, including reservations for requests in flight."""
    created_at_s: float
    """Unix time."""


Event = TypeVar("Event", WebhookEvent, BudgetEvent, BatchEvent)
_decoder = msgspec.json.Decoder(WebhookEvent)
_budget_decoder = msgspec.json.Decoder(BudgetEvent)
_batch_decoder = msgspec.json.Decoder(BatchEvent)


def encode_webhook_event(event: WebhookEvent) -> tuple[bytes, dict[str, str]]:
    """Returns the data and attributes of the event's message."""
    return msgspec.json.encode(event), {"schema": "1", "record": event.id, "event": event.event}


def decode_webhook_event(data: bytes) -> WebhookEvent:
    """Parses an event.

    Raises:
        UndecodableMessage: the message is not a webhook event.
    """
    return _decode(_decoder, data)


def _decode(decoder: msgspec.json.Decoder[Event], data: bytes) -> Event:
    try:
        return decoder.decode(data)
    except MALFORMED as error:
        raise UndecodableMessage(f"event: {error}", field="data") from error


def encode_batch_event(event: BatchEvent) -> tuple[bytes, dict[str, str]]:
    """Returns the data and attributes of the message about a finished batch."""
    return msgspec.json.encode(event), {"schema": "1", "batch": event.batch, "event": event.event}


def decode_batch_event(data: bytes) -> BatchEvent:
    """Parses a message about a finished batch. Raises as `decode_webhook_event` does."""
    return _decode(_batch_decoder, data)


def encode_budget_event(event: BudgetEvent) -> tuple[bytes, dict[str, str]]:
    """Returns the data and attributes of a budget warning's message."""
    attributes = {"schema": "1", "budget": event.month, "event": BUDGET_WARNING}
    return msgspec.json.encode(event), attributes


def decode_budget_event(data: bytes) -> BudgetEvent:
    """Parses a budget warning. Raises as `decode_webhook_event` does."""
    return _decode(_budget_decoder, data)


def tenant_secrets(setting: str, tenant: str) -> list[str]:
    """Returns the secrets used to sign for `tenant`, in the form that its receivers use.

    Callers should use the first one.

    Args:
        setting: `whsec_…`, comma-separated. During a rotation there are several, with the new one
            first.
        tenant: the tenant that owns the predictions.

    Raises:
        ConfigurationError: the setting is empty or malformed.
    """
    keys = [_key(secret.strip()) for secret in setting.split(",") if secret.strip()]
    if not keys:
        raise ConfigurationError(
            "PENSTOCK_WEBHOOK_SECRETS: is required to send webhooks", field="webhook_secrets"
        )
    own = [hmac.digest(key, f"webhooks of {tenant}".encode(), hashlib.sha256) for key in keys]
    return [PREFIX + base64.b64encode(key).decode() for key in own]


def signature(secrets: Sequence[str], webhook_id: str, at_s: int, body: bytes) -> str:
    """Returns the `webhook-signature` header: HMAC-SHA256s over `id.timestamp.body`."""
    signed = f"{webhook_id}.{at_s}.".encode() + body
    digests = [hmac.digest(_key(secret), signed, hashlib.sha256) for secret in secrets]
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _key(secret: str) -> bytes:
    try:
        # The standard alphabet, because Replicate's client splits a secret at each underscore.
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except ValueError as error:  # not base64, or not even ASCII
        raise ConfigurationError(
            f"PENSTOCK_WEBHOOK_SECRETS: {error}", field="webhook_secrets"
        ) from error
    if not secret.startswith(PREFIX) or len(key) < MIN_KEY_BYTES:
        words = f"a secret must be {PREFIX} followed by at least {MIN_KEY_BYTES} bytes in base64"
        raise ConfigurationError(f"PENSTOCK_WEBHOOK_SECRETS: {words}", field="webhook_secrets")
    return key
