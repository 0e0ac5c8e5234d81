"""One Publish call on the broker's state: checked as a whole, taken in at once or by steps."""

from collections.abc import Iterator
from typing import Any

from infra.emulators.pubsub.protos import message_class
from infra.emulators.pubsub.state.arrivals import Arrivals
from infra.emulators.pubsub.state.message import DELIVERY_COST_BYTES
from infra.emulators.pubsub.state.registry import Registry

_PublishResponse = message_class("PublishResponse")


class Publishing:
    """A publish that was checked. Its messages reach nobody before `let_out`.

    Args:
        registry: where the topic is.
        request: a `PublishRequest` that passed its checks. This takes its messages.
        cost_bytes: the memory that its messages take.

    Raises:
        PubsubError: the publish was refused and changed nothing.
    """

    def __init__(self, registry: Registry, request: Any, cost_bytes: int) -> None:
        self._registry = registry
        self._topic = registry.topic(request.topic)
        deliveries = len(request.messages) * self._topic.reach
        registry.storage.admit(cost_bytes + deliveries * DELIVERY_COST_BYTES)
        self._messages = request.messages
        self._message_ids: list[str] = []
        self._arrivals = Arrivals()

    @property
    def response(self) -> Any:
        """The `PublishResponse`, when all messages are in."""
        return _PublishResponse(message_ids=self._message_ids)

    def take_in(self) -> Iterator[None]:
        """Take the messages in, one at each step.

        Raises:
            ResourceExhausted: so many subscriptions get them that they take too much memory.
        """
        taking = self._registry.publish(self._topic, self._messages, self._arrivals)
        for message_id in taking:
            self._registry.journal.offered(message_id)
            self._message_ids.append(message_id)
            if len(self._message_ids) > 1:
                # What subscriptions with a filter add was not admitted yet.
                self._registry.storage.admit(0)
            yield

    def let_out(self) -> Iterator[None]:
        """Let the subscribers have the messages, one subscription at each step."""
        return self._arrivals.let_out()

    def withdraw(self) -> None:
        """Take back what was taken in: this publish failed."""
        self._registry.withdraw(set(map(int, self._message_ids)))
        self._arrivals.forget()
