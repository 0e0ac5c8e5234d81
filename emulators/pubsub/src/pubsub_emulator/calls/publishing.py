"""One Publish call on the broker's state: checked as a whole, taken in at once or by steps."""

from collections.abc import Generator, Iterator
from typing import Any

from pubsub_emulator.protos import message_class
from pubsub_emulator.state.arrivals import Arrivals
from pubsub_emulator.state.message import DELIVERY_COST_BYTES, cost_of
from pubsub_emulator.state.publishing import Measured
from pubsub_emulator.state.registry import Registry
from pubsub_emulator.state.topic import STEP_SINKS

_PublishResponse = message_class("PublishResponse")


class Publishing:
    """A publish that was checked. Its messages reach nobody before `let_out`.

    Args:
        request: a `PublishRequest` that passed its checks. This takes its messages.

    Raises:
        PubsubError: the publish was refused and changed nothing.
    """

    def __init__(self, registry: Registry, request: Any, measured: Measured) -> None:
        self._registry = registry
        self._topic = registry.topic(request.topic)
        self._messages = request.messages
        self._attributes = measured.attributes
        count = len(measured.attributes)
        registry.storage.admit(
            cost_of(measured.size_bytes, sum(map(len, measured.attributes)), count)
            + count * self._topic.reach * DELIVERY_COST_BYTES
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
        registry, now_s = self._registry, self._registry.timers.now_s()
        is_alone = len(self._messages) == 1
        messages_a_step = max(1, STEP_SINKS // (1 + self._topic.sinks))
        try:
            for message, attributes in zip(self._messages, self._attributes, strict=True):
                stored = registry.store(message, attributes, now_s)
                registry.journal.offered(stored.sequence)
                self.message_ids.append(message.message_id)
                for _ in self._topic.deliver(stored, self._arrivals):
                    yield
                if not is_alone:
                    # What subscriptions with a filter add was not admitted yet.
                    registry.storage.admit(0)
                    if len(self.message_ids) % messages_a_step == 0:
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
