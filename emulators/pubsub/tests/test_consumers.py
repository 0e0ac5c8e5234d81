"""Flow control and fairness between a subscription's consumers."""

from tests.world import World


def test_consumer_takes_no_more_than_it_has_room_for(world: World) -> None:
    world.publish(*"abcd")
    reader = world.consumer(max_messages=3)
    first = world.take(reader)
    assert [message.data for message in first] == ["a", "b", "c"]
    assert world.take(reader) == []
    world.ack(first[:1])
    assert [message.data for message in world.take(reader)] == ["d"]


def test_full_consumer_is_woken_when_a_lease_of_its_own_ends(world: World) -> None:
    world.publish(*"ab")
    reader = world.consumer(max_messages=1)
    first = world.take(reader)
    assert world.take(reader) == []
    assert reader.wakes == 0
    world.ack(first)
    assert reader.wakes == 1


def test_bytes_limit_stops_after_the_message_that_reaches_it(world: World) -> None:
    world.publish("x" * 600, "x" * 600, "x" * 600)
    reader = world.consumer(max_bytes=1000)
    assert len(world.take(reader)) == 2


def test_expired_lease_frees_the_room(world: World) -> None:
    world.publish(*"ab")
    reader = world.consumer(max_messages=1)
    world.take(reader)
    assert world.take(reader) == []
    world.advance(10)
    assert reader.wakes == 1
    assert len(world.take(reader)) == 1


def test_waiting_consumers_are_woken_in_turn_one_for_each_message(world: World) -> None:
    readers = [world.consumer() for _ in range(3)]
    for reader in readers:
        assert world.take(reader) == []
    world.publish("a")
    assert [reader.wakes for reader in readers] == [1, 0, 0]
    world.publish("b")
    assert [reader.wakes for reader in readers] == [1, 1, 0]


def test_consumer_that_writes_something_else_is_passed_over(world: World) -> None:
    stuck, idle = world.consumer(), world.consumer()
    world.take(stuck)
    world.take(idle)
    world.busy(stuck)  # with a ping response, on a connection whose peer is not reading
    world.publish("a")
    assert [stuck.wakes, idle.wakes] == [0, 1]
    assert [message.data for message in world.take(idle)] == ["a"]
    world.take(stuck)
    world.publish("b")
    assert stuck.wakes == 1


def test_consumer_that_was_woken_and_writes_something_else_hands_its_turn_on(world: World) -> None:
    stuck, idle = world.consumer(), world.consumer()
    world.take(stuck)
    world.take(idle)
    world.publish("a")
    assert [stuck.wakes, idle.wakes] == [1, 0]
    world.busy(stuck)
    assert idle.wakes == 1


def test_consumer_that_left_is_woken_for_nothing(world: World) -> None:
    """When a worker dies while holding messages, they are redelivered to the other workers."""
    gone, idle = world.consumer(), world.consumer()
    world.publish("a")
    in_hand = world.take(gone)
    for reader in (gone, idle):
        assert world.take(reader) == []
    world.leave(gone)
    world.ack(in_hand)
    for wakes in (1, 2):
        world.publish("b")
        assert [gone.wakes, idle.wakes] == [0, wakes]
        assert [message.data for message in world.take(idle)] == ["b"]
        world.take(idle)


def test_idle_consumers_share_what_came_together(world: World) -> None:
    readers = [world.consumer() for _ in range(2)]
    for reader in readers:
        world.take(reader)
    world.publish(*"abcd")
    assert [len(world.take(reader)) for reader in readers] == [2, 2]


def test_busy_consumer_does_not_hold_back_the_share_of_others(world: World) -> None:
    busy, idle = world.consumer(), world.consumer()
    world.publish("a")
    world.take(busy)
    world.take(idle)
    world.publish(*"bc")
    assert len(world.take(idle)) == 2


def test_turn_of_a_leaving_consumer_goes_to_the_next(world: World) -> None:
    subscription = world.broker.pullable("projects/test-project/subscriptions/workers")
    first, second = world.consumer(), world.consumer()
    world.take(first)
    world.take(second)
    world.publish("a")
    subscription.leave(first)
    assert second.wakes == 1
    assert [message.data for message in world.take(second)] == ["a"]


def test_leases_of_a_consumer_that_left_stay_until_they_run_out(world: World) -> None:
    subscription = world.broker.pullable("projects/test-project/subscriptions/workers")
    reader = world.consumer(ack_deadline_s=30)
    subscription.join(reader)
    world.publish("a")
    world.take(reader)
    subscription.leave(reader)
    world.advance(29)
    assert world.pull() == []
    world.advance(1)
    assert world.pull_data() == ["a"]
