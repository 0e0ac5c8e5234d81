"""A topic: the subscriptions that receive its messages, and the log kept for topic retention."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from pubsub_emulator.protos import Topic as TopicProto
from pubsub_emulator.state.arrivals import Arrivals
from pubsub_emulator.state.delivery_settings import seconds_of
from pubsub_emulator.state.filter import Equals, Filter, needed_attributes
from pubsub_emulator.state.journal import ChangeJournal
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.state.timers import Timer, Timers

STEP_SINKS = 50
"""Subscriptions per step. A message that forces all of a step's subscriptions to grow takes 3 ms.
"""


class Sink(Protocol):
    """Receives a topic's messages: a subscription, or a snapshot, which receives all of them."""

    path: str
    filter: Filter | None

    def add(self, message: StoredMessage, arrivals: Arrivals | None = None) -> None:
        """Add a message.

        With `arrivals`, consumers get the message only once the arrivals are released.
        """


class Topic:
    """A topic's state. GetTopic returns `proto`; `holder` is the topic's number in the journal.

    Filters of the form `attributes.KEY = "literal"`, on their own or as part of an AND, are found
    with two dict lookups, so a publish costs no more with a thousand of them than with one. Other
    filters are evaluated for each message.
    """

    moment_s = 0.0

    def __init__(
        self, proto: TopicProto, timers: Timers, journal: ChangeJournal, holder: int
    ) -> None:
        self.path: str = proto.name
        self.holder = holder
        self.log: deque[StoredMessage] = deque()
        self._timers = timers
        self._journal = journal
        self._log_timer: Timer | None = None
        self._sinks: dict[str, Sink] = {}
        """All sinks."""
        self._unfiltered: dict[str, Sink] = {}
        self._by_value: dict[str, dict[str, dict[str, Sink]]] = {}
        self._found_by: dict[str, Equals] = {}
        self._filtered: dict[str, Sink] = {}
        self.configure(proto)

    def configure(self, proto: TopicProto) -> None:
        """Apply new settings. Drops a log that is no longer needed."""
        self.proto = proto
        self.has_schema: bool = proto.HasField("schema_settings")
        self.retention_s = seconds_of(proto.message_retention_duration)
        self._drop_old()

    @property
    def reach(self) -> int:
        """Return how many sinks get every message."""
        return len(self._unfiltered)

    @property
    def sinks(self) -> int:
        """Return the maximum number of sinks one message can have."""
        return len(self._sinks)

    def attach(self, sink: Sink) -> None:
        """Send the sink every future message that matches its filter."""
        self._sinks[sink.path] = sink
        if sink.filter is None:
            self._unfiltered[sink.path] = sink
        elif needed := needed_attributes(sink.filter):
            # Index by the rarest condition: many filters may match the same kind of message, but
            # each one matches a different slot.
            found_by = min(needed, key=lambda one: len(self._with(one)))
            self._found_by[sink.path] = found_by
            values = self._by_value.setdefault(found_by.key, {})
            values.setdefault(found_by.value, {})[sink.path] = sink
        else:
            self._filtered[sink.path] = sink

    def detach(self, sink: Sink) -> None:
        self._sinks.pop(sink.path, None)
        self._unfiltered.pop(sink.path, None)
        self._filtered.pop(sink.path, None)
        found_by = self._found_by.pop(sink.path, None)
        if found_by is not None:
            values = self._by_value[found_by.key]
            del values[found_by.value][sink.path]
            if not values[found_by.value]:
                del values[found_by.value]
            if not values:
                del self._by_value[found_by.key]

    def _with(self, needed: Equals) -> Mapping[str, Sink]:
        return self._by_value.get(needed.key, {}).get(needed.value, {})

    def deliver(self, message: StoredMessage, arrivals: Arrivals | None = None) -> Iterable[None]:
        """Pass a new message to its sinks: all at once for up to 50, in steps for more."""
        if self.retention_s:
            self._journal.hold(message, self.holder)
            self.restore(message)
        sinks = self._reached(message.attributes)
        if len(sinks) > STEP_SINKS:
            return self._deliver_by_steps(message, sinks, arrivals)
        for sink in sinks:
            sink.add(message, arrivals)
        return ()

    def _deliver_by_steps(
        self, message: StoredMessage, sinks: list[Sink], arrivals: Arrivals | None
    ) -> Iterator[None]:
        for count, sink in enumerate(sinks, 1):
            # The sink may have been removed between steps.
            if self._sinks.get(sink.path) is sink:
                sink.add(message, arrivals)
            if count % STEP_SINKS == 0:
                yield

    def _reached(self, attributes: Mapping[str, str]) -> list[Sink]:
        reached = list(self._unfiltered.values())
        for key, values in self._by_value.items():
            value = attributes.get(key)
            if value is not None:
                reached += [
                    sink
                    for sink in values.get(value, {}).values()
                    if isinstance(sink.filter, Equals) or _wants(sink, attributes)
                ]
        if self._filtered:
            reached += [sink for sink in self._filtered.values() if _wants(sink, attributes)]
        return reached

    def restore(self, message: StoredMessage) -> None:
        """Add a message to the log."""
        self.log.append(message)
        if self._log_timer is None:
            self._arm_log_timer()

    def withdraw(self, sequences: Collection[int]) -> None:
        """Remove rolled-back messages from the log."""
        for message in [message for message in self.log if message.sequence in sequences]:
            self._journal.release(message, self.holder)
            self.log.remove(message)

    def close(self) -> None:
        """Drop the log after the topic is deleted."""
        self.retention_s = 0.0
        self._drop_old()

    def _drop_old(self) -> None:
        now_s = self._timers.now_s()
        while self.log and self.log[0].published_s + self.retention_s <= now_s:
            self._journal.release(self.log.popleft(), self.holder)
        self._arm_log_timer()

    def _arm_log_timer(self) -> None:
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_timer = None
        if self.log:
            self._log_timer = self._timers.at(
                self.log[0].published_s + self.retention_s, self._drop_old
            )


def _wants(sink: Sink, attributes: Mapping[str, str]) -> bool:
    return sink.filter is None or sink.filter.matches(attributes)
