"""One topic: which subscriptions a message reaches, and the log that topic retention keeps."""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Protocol

from infra.emulators.pubsub.protos import Topic as TopicProto
from infra.emulators.pubsub.state.arrivals import Arrivals
from infra.emulators.pubsub.state.delivery_settings import seconds_of
from infra.emulators.pubsub.state.filter import Equals, Filter, needed_attributes
from infra.emulators.pubsub.state.journal import ChangeJournal
from infra.emulators.pubsub.state.message import StoredMessage
from infra.emulators.pubsub.state.timers import Timer, Timers


class Sink(Protocol):
    """What a topic passes messages to: subscriptions, and snapshots, which want all of them."""

    path: str
    filter: Filter | None

    def add(self, message: StoredMessage, arrivals: Arrivals | None = None) -> None:
        """Take in one message. With `arrivals`, consumers get it when these let it out."""


class Topic:
    """The state of one topic. `proto` is what GetTopic shows, `holder` its number in the journal.

    Filters of the form `attributes.KEY = "literal"`, alone or as a part of an AND, are found by two
    dict look-ups, so a thousand of them cost a publish no more than one. Any other filter is tried
    on each message.
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
        self._unfiltered: dict[str, Sink] = {}
        self._by_value: dict[str, dict[str, dict[str, Sink]]] = {}
        self._found_by: dict[str, Equals] = {}
        self._filtered: dict[str, Sink] = {}
        self.configure(proto)

    def configure(self, proto: TopicProto) -> None:
        """Apply new settings. A log that is no longer kept is dropped."""
        self.proto = proto
        self.has_schema: bool = proto.HasField("schema_settings")
        self.retention_s = seconds_of(proto.message_retention_duration)
        self._drop_old()

    @property
    def reach(self) -> int:
        """How many get every message."""
        return len(self._unfiltered)

    def attach(self, sink: Sink) -> None:
        """Send it every message from now on that its filter matches."""
        if sink.filter is None:
            self._unfiltered[sink.path] = sink
        elif needed := needed_attributes(sink.filter):
            # The rarest: many may ask for one kind of message, and each for another slot of it.
            found_by = min(needed, key=lambda one: len(self._with(one)))
            self._found_by[sink.path] = found_by
            values = self._by_value.setdefault(found_by.key, {})
            values.setdefault(found_by.value, {})[sink.path] = sink
        else:
            self._filtered[sink.path] = sink

    def detach(self, sink: Sink) -> None:
        """Send it nothing more."""
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

    def deliver(self, message: StoredMessage, arrivals: Arrivals | None = None) -> None:
        """Pass a new message to everyone it is for."""
        if self.retention_s:
            self._journal.hold(message, self.holder)
            self.restore(message)
        attributes = message.attributes
        for sink in self._unfiltered.values():
            sink.add(message, arrivals)
        for key, values in self._by_value.items():
            value = attributes.get(key)
            if value is not None:
                for sink in values.get(value, {}).values():
                    if isinstance(sink.filter, Equals) or _wants(sink, attributes):
                        sink.add(message, arrivals)
        for sink in self._filtered.values():
            if _wants(sink, attributes):
                sink.add(message, arrivals)

    def restore(self, message: StoredMessage) -> None:
        """Take a message into the log."""
        self.log.append(message)
        if self._log_timer is None:
            self._arm_log_timer()

    def withdraw(self, sequences: Collection[int]) -> None:
        """Take messages out of the log again."""
        for message in [each for each in self.log if each.sequence in sequences]:
            self._journal.release(message, self.holder)
            self.log.remove(message)

    def close(self) -> None:
        """Drop the log. The topic was deleted."""
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
