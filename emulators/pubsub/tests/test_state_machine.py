"""Random histories of a topic: nothing is lost, no acked message returns, order is preserved."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from tests.world import (
    KeptWorld,
    Pulled,
    World,
    kept_world,
    message,
    subscription_path,
    topic_path,
)

MAX_ATTEMPTS = 5


class Deliveries(RuleBasedStateMachine):
    """Publishes, takes, acks, nacks, extends and waits at random, checking against a model.

    For each of the subscription's messages, the model tracks whether it was acked and how many
    times it was handed out.
    """

    leased: Bundle[Pulled] = Bundle("leased")

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make_world()
        self.published: dict[str, str] = {}
        self.settled: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.lease_ends_s: dict[str, tuple[str, float]] = {}
        self.readers_of: dict[str, int] = {}
        """Each outstanding message's consumer."""
        self.count = 0

    def make_world(self) -> World:
        return World()

    @initialize(ordered=st.booleans(), dead=st.booleans(), backoff_s=st.sampled_from([None, 0, 3]))
    def open(self, ordered: bool, dead: bool, backoff_s: int | None) -> None:
        self.world.topic()
        self.world.topic("dead")
        self.world.subscription("morgue", "dead")
        fields: dict[str, Any] = {"enable_message_ordering": ordered}
        if dead:
            policy = {
                "dead_letter_topic": topic_path("dead"),
                "max_delivery_attempts": MAX_ATTEMPTS,
            }
            fields["dead_letter_policy"] = policy
        if backoff_s is not None:
            backoff = {"seconds": backoff_s}
            fields["retry_policy"] = {"minimum_backoff": backoff, "maximum_backoff": backoff}
        self.ordered, self.dead = ordered, dead
        self.world.subscription(**fields)
        self.readers = [self.world.consumer(10, max_messages=2), self.world.consumer(20)]

    @rule(key=st.sampled_from(["", "", "k", "l"]), number=st.integers(1, 3))
    def publish(self, key: str, number: int) -> None:
        names = [f"m{self.count + index}" for index in range(number)]
        self.count += number
        self.world.publish(*(message(name, ordering_key=key) for name in names))
        self.published |= dict.fromkeys(names, key)

    @rule(target=leased, reader=st.integers(0, 1))
    def take_one(self, reader: int) -> MultipleResults[Pulled] | Pulled:
        pulled = self.world.take(self.readers[reader], max_messages=1)
        if not pulled:
            return multiple()
        self.note(pulled[0], self.readers[reader].ack_deadline_s, reader)
        return pulled[0]

    @rule(message=consumes(leased))
    def ack(self, message: Pulled) -> None:
        self.world.ack([message])
        self.settled.add(message.data)
        self.end(message)

    @rule(message=leased)
    def nack(self, message: Pulled) -> None:
        self.world.nack([message])
        if message.ack_id in self.lease_ends_s:
            self.call_back_after(message.data)
        self.end(message)

    @rule(message=leased, deadline_s=st.sampled_from([1, 30]))
    def extend(self, message: Pulled, deadline_s: int) -> None:
        self.world.modify([message], deadline_s)
        if message.ack_id in self.lease_ends_s:
            self.lease_ends_s[message.ack_id] = (message.data, self.world.now_s + deadline_s)

    @rule(seconds=st.sampled_from([0.5, 3, 10, 30]))
    def wait(self, seconds: float) -> None:
        until_s = self.world.now_s + seconds
        while ends := [end_s for _, end_s in self.lease_ends_s.values() if end_s <= until_s]:
            # Only one lease at a time, because when a lease ends, the leases of later messages with
            # the same key end too.
            first_s = min(ends)
            self.world.advance(first_s - self.world.now_s)
            ended = [lease for lease in self.lease_ends_s.items() if lease[1][1] == first_s]
            for ack_id, (name, _) in sorted(ended, key=lambda lease: int(lease[1][0][1:])):
                if self.lease_ends_s.pop(ack_id, None):
                    self.call_back_after(name)
        self.world.advance(until_s - self.world.now_s)

    @invariant()
    def flow_control_counts_what_is_out(self) -> None:
        if hasattr(self, "readers"):
            assert sum(reader.outstanding_messages for reader in self.readers) == len(
                self.lease_ends_s
            )
            assert self.readers[0].outstanding_messages <= 2
            assert all(reader.outstanding_bytes >= 0 for reader in self.readers)

    def call_back_after(self, name: str) -> None:
        """When a message is redelivered, so are the later outstanding ones with its key."""
        key = self.published[name]
        if not (self.ordered and key):
            return
        for ack_id, (later, _) in list(self.lease_ends_s.items()):
            if self.published[later] == key and int(later[1:]) > int(name[1:]):
                del self.lease_ends_s[ack_id]
                self.attempts[later] -= 1

    def note(self, pulled: Pulled, deadline_s: float, reader: int) -> None:
        name = pulled.data
        assert name not in self.settled, "an acked message came back"
        assert name not in {held for held, _ in self.lease_ends_s.values()}, (
            "a leased message was handed out"
        )
        self.attempts[name] = self.attempts.get(name, 0) + 1
        if self.dead:
            assert pulled.delivery_attempt == self.attempts[name] <= MAX_ATTEMPTS
        key = self.published[name]
        if self.ordered and key:
            older = [
                other
                for other, of_key in self.published.items()
                if of_key == key and int(other[1:]) < int(name[1:])
            ]
            out = {held for held, _ in self.lease_ends_s.values()}
            assert set(older) <= self.settled | self.letters() | out, (
                "a message overtook an older one of its key"
            )
            assert {self.readers_of[other] for other in out & set(older)} <= {reader}, (
                "two consumers have messages of one key"
            )
        self.readers_of[name] = reader
        self.lease_ends_s[pulled.ack_id] = (name, self.world.now_s + deadline_s)

    def end(self, message: Pulled) -> None:
        self.lease_ends_s = {
            ack_id: lease
            for ack_id, lease in self.lease_ends_s.items()
            if ack_id != message.ack_id and lease[0] not in self.settled
        }

    def letters(self) -> set[str]:
        backlog = self.world.broker.registry.subscriptions[subscription_path("morgue")].backlog
        return {stored.proto.data.decode() for stored in backlog.messages}

    def teardown(self) -> None:
        """In the end, every message is acked or has failed often enough to be a dead letter."""
        if not hasattr(self, "readers"):
            return
        for _ in range((len(self.published) + 1) * (MAX_ATTEMPTS if self.dead else 1)):
            self.wait(40)
            pulled = self.world.pull()
            for pulled_message in pulled:
                self.note(pulled_message, 10, reader=-1)
            for pulled_message in pulled:
                if self.dead:
                    self.nack(pulled_message)
                else:
                    self.ack(pulled_message)
        letters = self.letters()
        assert self.settled | letters == set(self.published)
        assert all(self.attempts[name] == MAX_ATTEMPTS for name in letters)
        assert self.dead or not letters
        backlog = self.world.broker.registry.subscriptions[subscription_path("workers")].backlog
        assert backlog.messages == []


class KeptDeliveries(Deliveries):
    """The same in a directory, restarted at random points: a restart ends every lease and changes
    nothing else.
    """

    world: KeptWorld

    def make_world(self) -> World:
        self.undo = ExitStack()
        folder = self.undo.enter_context(tempfile.TemporaryDirectory())
        return self.undo.enter_context(kept_world(Path(folder)))

    @rule()
    def restart(self) -> None:
        self.world.restart()
        self.lease_ends_s.clear()
        for key in {"k", "l"} if self.ordered and self.dead else ():
            remaining = [
                name
                for name, of_key in self.published.items()
                if of_key == key and name not in self.settled | self.letters()
            ]
            # Only the oldest message can have had its last attempt ended by this restart.
            for name in remaining[1:]:
                if name in self.attempts:
                    self.attempts[name] = min(self.attempts[name], MAX_ATTEMPTS - 1)
        self.readers = [self.world.consumer(10, max_messages=2), self.world.consumer(20)]

    def teardown(self) -> None:
        with self.undo:
            super().teardown()
            self.world.flush()
            assert self.world.rows() == (len(self.letters()) if hasattr(self, "readers") else 0)


Deliveries.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_deliveries = Deliveries.TestCase
KeptDeliveries.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_deliveries_with_restarts = KeptDeliveries.TestCase
