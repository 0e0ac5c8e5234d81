"""Waiting consumers are woken for messages, no matter what other consumers did before."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.world import Pulled, Reader, World, subscription_path


class Wakes(RuleBasedStateMachine):
    """Consumers that, like streams, sleep once they find nothing and try again only when woken."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.asleep: dict[Reader, int] = {}
        """How many times each consumer had been woken by the time it fell asleep."""
        self.awake: list[Reader] = []
        self.leased: list[Pulled] = []

    @initialize()
    def open(self) -> None:
        self.world.topic()
        self.world.subscription()

    @rule(max_messages=st.integers(0, 2))
    def join(self, max_messages: int) -> None:
        self._ask(self.world.consumer(max_messages=max_messages))

    @precondition(lambda self: self.awake or self._woken())
    @rule(number=st.integers(0))
    def take(self, number: int) -> None:
        free = self.awake + self._woken()
        self._ask(self._rise(free[number % len(free)]))

    @precondition(lambda self: self.asleep)
    @rule(number=st.integers(0))
    def write_something_else(self, number: int) -> None:
        reader = list(self.asleep)[number % len(self.asleep)]
        self.world.busy(reader)
        self.awake.append(self._rise(reader))

    @precondition(lambda self: self.asleep or self.awake)
    @rule(number=st.integers(0))
    def leave(self, number: int) -> None:
        all_ = [*self.asleep, *self.awake]
        self.world.leave(self._rise(all_[number % len(all_)]))

    @rule(number=st.integers(1, 3))
    def publish(self, number: int) -> None:
        self.world.publish(*("m" * number))

    @precondition(lambda self: self.leased)
    @rule(end=st.sampled_from(["ack", "nack", "none in time"]))
    def settle(self, end: str) -> None:
        if end == "none in time":
            self.world.advance(30)
        else:
            (self.world.ack if end == "ack" else self.world.nack)(self.leased)
        self.leased.clear()

    @invariant()
    def there_is_one_awake_for_each_message(self) -> None:
        path = subscription_path("workers")
        if path in self.world.broker.registry.subscriptions:
            can_take = [reader for reader in self.asleep if reader.has_room]
            ready = len(self.world.broker.registry.subscriptions[path].backlog.messages) - len(
                self.leased
            )
            assert len(self._woken()) >= min(ready, len(can_take))

    def _woken(self) -> list[Reader]:
        return [reader for reader, wakes in self.asleep.items() if reader.wakes > wakes]

    def _rise(self, reader: Reader) -> Reader:
        self.asleep.pop(reader, None)
        if reader in self.awake:
            self.awake.remove(reader)
        return reader

    def _ask(self, reader: Reader) -> None:
        while deliveries := self.world.take(reader):
            self.leased += deliveries
        self.asleep[reader] = reader.wakes


TestWakes = Wakes.TestCase
