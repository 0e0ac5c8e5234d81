"""Each attempt to deliver an event is logged without request and response bodies, and the final
event can be resent.
"""

from __future__ import annotations

import pytest

from shared.stores.webhook_log import WebhookAttempt
from shared.webhooks.event import WebhookEvent, encode_webhook_event, tenant_secrets
from tests.limits import WAIT_LIMIT_S
from tests.workers.functions.conftest import SECRETS
from tests.workers.functions.receiver import Receiver
from tests.workers.functions.test_webhook import METRIC, check, finish
from tests.workers.functions.world import World

pytestmark = pytest.mark.anyio


async def test_attempts_are_logged_and_numbered(world: World, receiver: Receiver) -> None:
    delivered = await world.count(METRIC, "delivered", 0)
    receiver.statuses = [500]
    await world.create(receiver.url)
    await finish(world)
    await world.tell("completed")
    deliveries = await receiver.wait(2)
    await world.count(METRIC, "delivered", delivered + 1)
    first, second = await world.stores.webhook_log.read(world.request_id)
    assert [(one.attempt, one.status, one.error) for one in (first, second)] == [
        (1, 500, None),
        (2, 204, None),
    ]
    assert {first.webhook_id, second.webhook_id} == {deliveries[0].id}
    assert first.event == "completed"
    assert 0 < first.duration_s < WAIT_LIMIT_S


async def test_what_can_not_be_reached_is_logged(world: World) -> None:
    await world.create("http://127.0.0.1:9/hook?secret=1")
    assert await world.push_event("start", 1) == 503
    (attempt,) = await world.stores.webhook_log.read(world.request_id)
    assert isinstance(attempt, WebhookAttempt)
    assert attempt.status is None
    assert attempt.error
    assert "secret" not in attempt.error


async def test_redirect_is_named_as_the_reason(world: World, receiver: Receiver) -> None:
    """The status 307 alone doesn't make it clear to the tenant that redirects aren't followed."""
    receiver.statuses = [307]
    await world.create(receiver.url)
    assert await world.push_event("start", 1) == 503
    (attempt,) = await world.stores.webhook_log.read(world.request_id)
    assert attempt.status == 307
    assert attempt.error is not None
    assert "redirect" in attempt.error
    (row,) = await world.deliveries(1)
    assert (row["status_code"], row["error"]) == (307, "redirected")


async def test_replay_is_signed_anew_under_the_same_id(world: World, receiver: Receiver) -> None:
    delivered = await world.count(METRIC, "delivered", 0)
    await world.create(receiver.url)
    await finish(world)
    await world.tell("completed")
    await receiver.wait(1)
    await world.count(METRIC, "delivered", delivered + 1)
    data, attributes = encode_webhook_event(
        WebhookEvent(world.request_id, "completed", is_replay=True)
    )
    await world.broker.publish(world._events, data, attributes)
    first, second = await receiver.wait(2)
    assert (first.id, first.body) == (second.id, second.body)
    check(second, tenant_secrets(SECRETS, "t")[0])
