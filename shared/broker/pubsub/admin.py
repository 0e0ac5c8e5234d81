"""Creates and deletes topics and subscriptions, for an instance's inbox and for local stacks.

Requests never wait for these calls. The service allows 6,000 such calls per minute per project
(quota `administratorPerMinutePerProject`), shared by all instances.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from google.pubsub_v1.types import pubsub
from grpc import StatusCode, aio

from shared.broker.pubsub.channel import (
    Channels,
    Method,
    RawMessage,
    subscription_path,
    topic_path,
    translate,
)
from shared.broker.transport import SubscriptionSettings
from shared.errors import ConfigurationError

CALLS_IN_FLIGHT = 32
PAGE_SIZE = 1000

_Topic, _Subscription = pubsub.Topic.pb(), pubsub.Subscription.pb()
_ModifyPushConfig = pubsub.ModifyPushConfigRequest.pb()


class PubSubAdmin:
    """A connection for admin calls.

    Each call is retried after transient failures, within `timeout_s`.

    Every method raises BadInput if the broker rejects a name or setting, ConfigurationError if we
    do not have permission, and Unavailable or Overloaded if the call did not succeed in time.
    Implements shared.broker.transport.Admin.
    """

    def __init__(self, project: str, endpoint: str = "", *, timeout_s: float = 30.0) -> None:
        self._project = project
        self._channels = Channels(endpoint)
        self._timeout_s = timeout_s
        self._in_flight = asyncio.Semaphore(CALLS_IN_FLIGHT)

    async def __aenter__(self) -> Self:
        await self._channels.load_credentials()
        self._channel = self._channels.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channels.close()

    async def ensure_topic(self, topic_id: str) -> bool:
        """Creates a topic if it doesn't exist. Returns whether it was created."""
        request = _Topic(name=topic_path(self._project, topic_id))
        return await self._create("Publisher/CreateTopic", _Topic, request)

    async def ensure_subscription(
        self, subscription_id: str, settings: SubscriptionSettings
    ) -> bool:
        """Creates a subscription if it doesn't exist. Returns whether it was created.

        The push settings of an existing subscription are updated.

        Raises:
            ConfigurationError: a subscription with this name has a different topic or filter, which
                can't be changed.
        """
        request = self._subscription(subscription_id, settings)
        if await self._create("Subscriber/CreateSubscription", _Subscription, request):
            return True
        topic = await self._find(
            "Subscriber/GetSubscription", _Subscription, subscription=request.name
        )
        if topic is not None and (topic.topic, topic.filter) != (request.topic, request.filter):
            raise ConfigurationError(
                f"{request.name} already exists with topic {topic.topic!r} and filter "
                f"{topic.filter!r}, not {request.topic!r} and {request.filter!r}"
            )
        if topic is not None and topic.push_config.push_endpoint != settings.push_endpoint:
            await self._push_to(request)
        return False

    async def delete_topic(self, topic_id: str) -> bool:
        """Deletes a topic.

        Returns whether it existed. Its subscriptions remain, without a topic.
        """
        return await self._delete(
            "Publisher/DeleteTopic", topic=topic_path(self._project, topic_id)
        )

    async def delete_subscription(self, subscription_id: str) -> bool:
        """Deletes a subscription and its backlog. Returns whether it existed."""
        path = subscription_path(self._project, subscription_id)
        return await self._delete("Subscriber/DeleteSubscription", subscription=path)

    async def subscription_exists(self, subscription_id: str) -> bool:
        path = subscription_path(self._project, subscription_id)
        return (
            await self._find("Subscriber/GetSubscription", _Subscription, subscription=path)
            is not None
        )

    async def missing_subscriptions(self, subscription_ids: list[str]) -> list[str]:
        """Returns the `subscription_ids` that do not exist, in order."""
        existing = await self.subscriptions()
        return [name for name in subscription_ids if name not in existing]

    async def subscriptions(self) -> dict[str, SubscriptionSettings]:
        """Returns all of the project's current subscriptions, keyed by ID.

        Uses default values for any settings that a subscription does not report.
        """
        return {
            proto.name.rpartition("/")[2]: SubscriptionSettings(
                proto.topic.rpartition("/")[2],
                filter=proto.filter,
                ack_deadline_s=proto.ack_deadline_seconds,
                retention_s=proto.message_retention_duration.seconds,
                dead_letter_topic_id=proto.dead_letter_policy.dead_letter_topic.rpartition("/")[2],
                push_endpoint=proto.push_config.push_endpoint,
            )
            for proto in await self._list()
        }

    async def _create(self, path: str, response: Any, request: RawMessage) -> bool:
        try:
            await self._call(Method(self._channel, path, response, "name"), request)
        except aio.AioRpcError as error:
            if error.code() is StatusCode.ALREADY_EXISTS:
                return False
            raise translate(error, f"create {request.name}") from error
        return True

    async def _push_to(self, subscription: RawMessage) -> None:
        changed = _ModifyPushConfig(
            subscription=subscription.name, push_config=subscription.push_config
        )
        try:
            await self._call(
                Method(self._channel, "Subscriber/ModifyPushConfig", None, "subscription"), changed
            )
        except aio.AioRpcError as error:
            raise translate(error, f"change {subscription.name}") from error

    async def _delete(self, path: str, **name: str) -> bool:
        (field, value) = next(iter(name.items()))
        request = getattr(pubsub, f"{path.rpartition('/')[2]}Request").pb()(**name)
        try:
            await self._call(Method(self._channel, path, None, field), request)
        except aio.AioRpcError as error:
            if error.code() is StatusCode.NOT_FOUND:
                return False
            raise translate(error, f"delete {value}") from error
        return True

    async def _find(self, path: str, response: Any, **name: str) -> RawMessage:
        (field, value) = next(iter(name.items()))
        request = getattr(pubsub, f"{path.rpartition('/')[2]}Request").pb()(**name)
        try:
            return await self._call(Method(self._channel, path, response, field), request)
        except aio.AioRpcError as error:
            if error.code() is StatusCode.NOT_FOUND:
                return None
            raise translate(error, f"look at {value}") from error

    async def _list(self) -> list[RawMessage]:
        path, response = "Subscriber/ListSubscriptions", pubsub.ListSubscriptionsResponse.pb()
        method = Method(self._channel, path, response, "project")
        subscriptions: list[RawMessage] = []
        request = pubsub.ListSubscriptionsRequest.pb()(
            project=f"projects/{self._project}", page_size=PAGE_SIZE
        )
        while True:
            try:
                page = await self._call(method, request)
            except aio.AioRpcError as error:
                raise translate(error, "list subscriptions") from error
            subscriptions.extend(page.subscriptions)
            if not page.next_page_token:
                return subscriptions
            request.page_token = page.next_page_token

    async def _call(self, method: Method, request: RawMessage) -> RawMessage:
        async with self._in_flight:
            return await method.until(request, asyncio.get_running_loop().time() + self._timeout_s)

    def _subscription(self, subscription_id: str, settings: SubscriptionSettings) -> RawMessage:
        request = _Subscription(
            name=subscription_path(self._project, subscription_id),
            topic=topic_path(self._project, settings.topic_id),
            filter=settings.filter,
            ack_deadline_seconds=settings.ack_deadline_s,
            enable_message_ordering=settings.is_ordered,
        )
        request.message_retention_duration.FromSeconds(settings.retention_s)
        if settings.push_endpoint:
            request.push_config.push_endpoint = settings.push_endpoint
        request.expiration_policy.SetInParent()  # set but without a TTL: it never expires
        if settings.expires_after_s:
            request.expiration_policy.ttl.FromSeconds(settings.expires_after_s)
        if settings.retry_min_s is not None:
            request.retry_policy.minimum_backoff.FromMilliseconds(
                round(settings.retry_min_s * 1000)
            )
            request.retry_policy.maximum_backoff.FromMilliseconds(
                round(settings.retry_max_s * 1000)
            )
        if settings.dead_letter_topic_id:
            request.dead_letter_policy.dead_letter_topic = topic_path(
                self._project, settings.dead_letter_topic_id
            )
            request.dead_letter_policy.max_delivery_attempts = settings.max_delivery_attempts
        return request
