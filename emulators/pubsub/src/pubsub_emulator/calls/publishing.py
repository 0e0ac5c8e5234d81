"""A Publish call on the broker's state: checked as a whole, then added at once or in steps."""

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
    """A publish that passed its checks. Its messages are delivered only after `let_out`.

    Args:
        request: a `PublishRequest` that passed its checks. The messages are moved out of the
            request.

    Raises:
        PubsubError: the publish was rejected and changed nothing.
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
        """Return the `PublishResponse` once all messages have been added."""
        return _PublishResponse(message_ids=self.message_ids)

    def take_in(self) -> Generator[None]:
        """Add the messages in steps.

        If the generator is closed before the last step, undo everything.

        Raises:
            ResourceExhausted: the messages and their copies for all subscriptions would use too
            much memory.
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
                    # The earlier check did not cover the memory used by filtered subscriptions.
                    registry.storage.admit(0)
                    if len(self.message_ids) % messages_a_step == 0:
                        yield
        except BaseException:
            self._withdraw()
            raise

    def let_out(self) -> Iterator[None]:
        """Make the messages available to subscribers, yielding after each subscription."""
        return self._arrivals.let_out()

    def _withdraw(self) -> None:
        self._registry.withdraw(set(map(int, self.message_ids)))
        self._arrivals.forget()
