"""Webhook events and signatures; the delivery function's tests cover how clients read them."""

from __future__ import annotations

import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import (
    WEBHOOKS_SUBSCRIPTION_ID,
    WEBHOOKS_TOPIC_ID,
    SubscriptionSettings,
)
from shared.errors import BadInput, ConfigurationError, UndecodableMessage
from shared.webhooks.event import (
    WebhookEvent,
    decode_webhook_event,
    encode_webhook_event,
    signature,
    tenant_secrets,
)
from shared.webhooks.publisher import WebhookPublisher

WEBHOOKS = SubscriptionSettings(WEBHOOKS_TOPIC_ID)
# The example from
# https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SIGNED = ("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_signature_is_that_of_the_specification() -> None:
    assert signature([SECRET], *SIGNED) == SIGNATURE


def test_two_secrets_sign_twice() -> None:
    first, second = signature(["whsec_" + "eHh4" * 8, SECRET], *SIGNED).split(" ")
    assert (first.startswith("v1,"), second) == (True, SIGNATURE)


def test_tenants_have_secrets_of_their_own() -> None:
    old, new = SECRET, "whsec_" + "eHh4" * 8
    ours, theirs = (
        tenant_secrets(f"{new}, {old}", "ours"),
        tenant_secrets(f"{new}, {old}", "theirs"),
    )
    assert len({*ours, *theirs}) == 4
    assert ours == [*tenant_secrets(new, "ours"), *tenant_secrets(old, "ours")]
    assert all(secret.count("_") == 1 and "-" not in secret for secret in ours)


@pytest.mark.parametrize(
    "setting",
    [
        "",
        " , ",
        "secret",
        "whsec_",
        "whsec_c2hvcnQ=",
        "whsec_" + "-_-_" * 8,
        SECRET[6:],
        SECRET + "ä",
    ],
)
def test_wrong_settings_are_named(setting: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_WEBHOOK_SECRETS"):
        tenant_secrets(setting, "t")


def test_event_comes_back() -> None:
    data, attributes = encode_webhook_event(WebhookEvent("req_1", "output", 3))
    assert decode_webhook_event(data) == WebhookEvent("req_1", "output", 3)
    assert attributes == {"schema": "1", "record": "req_1", "event": "output"}


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"id": "r", "event": "end"}', b'{"id": 1, "event": "start"}']
)
def test_other_messages_are_no_events(data: bytes) -> None:
    with pytest.raises(UndecodableMessage):
        decode_webhook_event(data)


@pytest.mark.anyio
async def test_only_subscribed_events_are_published() -> None:
    async with InMemoryBroker() as broker:
        await broker.ensure_topic(WEBHOOKS_TOPIC_ID)
        await broker.ensure_subscription(WEBHOOKS_SUBSCRIPTION_ID, WEBHOOKS)
        publisher = WebhookPublisher(broker)
        await publisher.publish("a", ["start"], "completed")
        await publisher.publish("b", ["start", "logs"], "logs", 3)
        async with broker.subscribe(WEBHOOKS_SUBSCRIPTION_ID, max_messages=10) as subscription:
            message = await anext(aiter(subscription))
            assert decode_webhook_event(message.data) == WebhookEvent("b", "logs", 3)


@pytest.mark.anyio
async def test_an_event_without_a_topic_is_an_error_or_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with InMemoryBroker() as broker:
        publisher = WebhookPublisher(broker)
        with pytest.raises(BadInput):
            await publisher.publish("a", ["start"], "start")
        await publisher.try_publish("a", ["start"], "start")
    assert "webhook event not published" in caplog.messages
