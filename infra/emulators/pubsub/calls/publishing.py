"""One Publish call on the broker's state: checked as a whole, taken in at once or by steps."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from infra.emulators.pubsub.protos import message_class
from infra.emulators.pubsub.state.arrivals import Arrivals
from infra.emulators.pubsub.state.message import DELIVERY_COST_BYTES, cost_of
from infra.emulators.pubsub.state.registry import Registry

_PublishResponse = message_class("PublishResponse")


class Publishing:
    """A publish that was checked. Its messages reach nobody before `let_out`.

    Args:
        registry: where the topic is.
        request: a `PublishRequest` that passed its checks. This takes its messages.
        attributes: those of each message.

    Raises:
        PubsubError: the publish was refused and changed nothing.
    """

    def __init__(
        self, registry: Registry, request: Any, attributes: Sequence[dict[str, str]]
    ) -> None:
        self._registry = registry
        self._topic = registry.topic(request.topic)
        self._messages = request.messages
        self._attributes = attributes
        registry.storage.admit(
            cost_of(request.ByteSize(), sum(map(len, attributes)), len(attributes))
            + len(attributes) * self._topic.reach * DELIVERY_COST_BYTES
        )
        self.message_ids: list[str] = []
        self._arrivals = Arrivals()

    @property
    def response(self) -> Any:
        """The `PublishResponse`, when all messages are in."""
        return _PublishResponse(message_ids=self.message_ids)

    def take_in(self) -> Generator[None]:
        """Take the messages in, by steps. Closed before the last, it takes all back.

        Raises:
            ResourceExhausted: so many subscriptions get them that they take too much memory.
        """
        now_s = self._registry.timers.now_s()
        is_alone = len(self._messages) == 1
        try:
            for message, attributes in zip(self._messages, self._attributes, strict=True):
                steps = self._registry.publish(
                    self._topic, message, attributes, now_s, self._arrivals
                )
                self._registry.journal.offered(message.message_id)
                self.message_ids.append(message.message_id)
                yield from steps
                if not is_alone:
                    # What subscriptions with a filter add was not admitted yet.
                    self._registry.storage.admit(0)
                    yield
        except BaseException:
            self._withdraw()
            raise

    def let_out(self) -> Iterator[None]:
        """Let the subscribers have the messages, a step between two subscriptions."""
        return self._arrivals.let_out()

    def _withdraw(self) -> None:
        self._registry.withdraw(set(map(int, self.message_ids)))
        self._arrivals.forget()
