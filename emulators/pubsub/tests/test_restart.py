"""A broker in a directory, killed at any point and restarted from its files."""

from typing import Any

import pytest

from pubsub_emulator.errors import AckIdsRefused, ResourceNotFound
from tests.world import (
    KeptWorld,
    message,
    snapshot_path,
    subscription_path,
    topic_path,
)

DAY_S = 86400
DEAD_LETTERS = {"dead_letter_topic": topic_path("dead"), "max_delivery_attempts": 5}


def get(world: KeptWorld, subscription_id: str = "workers") -> Any:
    return world.call(
        "GetSubscription", "GetSubscriptionRequest", subscription=subscription_path(subscription_id)
    )


def make_snapshot(world: KeptWorld) -> Any:
    request = {"name": snapshot_path("before"), "subscription": subscription_path("workers")}
    return world.call("CreateSnapshot", "CreateSnapshotRequest", **request)


def seek(world: KeptWorld, **target: Any) -> None:
    world.call("Seek", "SeekRequest", subscription=subscription_path("workers"), **target)


def test_settings_come_back_as_they_were(kept: KeptWorld) -> None:
    kept.subscription(
        filter='attributes.model = "a"',
        ack_deadline_seconds=20,
        enable_message_ordering=True,
        retain_acked_messages=True,
        message_retention_duration={"seconds": 3600},
        expiration_policy={"ttl": {"seconds": 2 * DAY_S}},
        dead_letter_policy=DEAD_LETTERS,
        retry_policy={"minimum_backoff": {"seconds": 1}, "maximum_backoff": {"seconds": 2}},
        labels={"kind": "test"},
    )
    kept.subscription(
        "pushed", push_config={"push_endpoint": "http://localhost:1/push", "attributes": {"a": "b"}}
    )
    before = [type(resource)() for resource in (get(kept), get(kept, "pushed"))]
    for copy, resource in zip(before, (get(kept), get(kept, "pushed")), strict=True):
        copy.CopyFrom(resource)
    kept.restart()
    assert [get(kept), get(kept, "pushed")] == before
    assert kept.call("GetTopic", "GetTopicRequest", topic=topic_path("jobs")).name == topic_path(
        "jobs"
    )


def test_updates_and_deletions_come_back(kept: KeptWorld) -> None:
    kept.subscription()
    kept.subscription("gone")
    kept.restart()
    update = {"name": subscription_path("workers"), "ack_deadline_seconds": 33}
    mask = {"paths": ["ack_deadline_seconds"]}
    kept.call(
        "UpdateSubscription", "UpdateSubscriptionRequest", subscription=update, update_mask=mask
    )
    push = {"push_endpoint": "http://localhost:1/push"}
    path = subscription_path("workers")
    kept.call("ModifyPushConfig", "ModifyPushConfigRequest", subscription=path, push_config=push)
    kept.call(
        "DeleteSubscription", "DeleteSubscriptionRequest", subscription=subscription_path("gone")
    )
    kept.restart()
    assert get(kept).ack_deadline_seconds == 33
    assert get(kept).push_config.push_endpoint == "http://localhost:1/push"
    with pytest.raises(ResourceNotFound):
        get(kept, "gone")


def test_unacked_messages_come_back_and_acked_ones_do_not(kept: KeptWorld) -> None:
    kept.subscription()
    kept.publish("waits", "leased", "acked")
    pulled = {message.data: message for message in kept.pull(max_messages=3)}
    kept.ack([pulled["acked"]])
    kept.restart()
    assert kept.pull_data() == ["waits", "leased"]
    assert kept.rows() == 2


def test_ack_that_was_not_written_is_forgotten(kept: KeptWorld) -> None:
    kept.subscription()
    kept.publish("a")
    kept.flush()
    kept.ack(kept.pull())
    kept.crash()
    assert kept.pull_data() == ["a"]


def test_ack_id_of_before_still_acks(kept: KeptWorld) -> None:
    kept.subscription()
    kept.publish("a", "b")
    before = kept.pull()
    kept.restart()
    kept.ack(before)
    assert kept.pull_data() == []
    kept.publish("c")
    kept.ack(before)
    assert kept.pull_data() == ["c"]


def test_exactly_once_refuses_an_ack_id_of_before(kept: KeptWorld) -> None:
    kept.subscription(enable_exactly_once_delivery=True)
    kept.publish("a")
    before = kept.pull()
    kept.restart()
    again = kept.pull()
    with pytest.raises(AckIdsRefused):
        kept.ack(before)
    kept.ack(again)


def test_message_ids_go_on_though_the_clock_stands_still(kept: KeptWorld) -> None:
    kept.subscription()
    (before,) = kept.publish("a")
    kept.restart()
    (after,) = kept.publish("b")
    assert int(after) > int(before)


def test_filter_and_attributes_hold_after_a_restart(kept: KeptWorld) -> None:
    kept.subscription(filter='attributes.slot = "1"')
    kept.subscription("others", filter='NOT attributes.slot = "1"')
    kept.publish(message("before", slot="1"))
    kept.restart()
    kept.publish(message("mine", slot="1"), message("theirs", slot="2"))
    assert [(received.data, dict(received.message.attributes)) for received in kept.pull()] == [
        ("before", {"slot": "1"}),
        ("mine", {"slot": "1"}),
    ]
    assert kept.pull_data("others") == ["theirs"]


def test_attempts_go_on_and_end_in_a_dead_letter(kept: KeptWorld) -> None:
    kept.subscription(dead_letter_policy=DEAD_LETTERS)
    kept.subscription("morgue", "dead")
    kept.publish("a")
    attempts = []
    for _ in range(4):
        pulled = kept.pull()
        attempts.append(pulled[0].delivery_attempt)
        kept.nack(pulled)
        kept.restart()
    attempts.append(kept.pull()[0].delivery_attempt)
    assert attempts == [1, 2, 3, 4, 5]
    # That was its last attempt, so it is not delivered again.
    kept.restart()
    kept.advance(0)
    assert kept.pull() == []
    (letter,) = kept.pull("morgue")
    assert letter.message.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5"
    kept.ack([letter], "morgue")
    kept.flush()
    assert kept.rows() == 0


def test_ordering_keys_keep_their_order(kept: KeptWorld) -> None:
    kept.subscription(enable_message_ordering=True)
    kept.publish(*(message(text, ordering_key="k") for text in "1234"))
    kept.publish(message("x", ordering_key="l"))
    kept.ack(kept.pull()[:1])
    seen = []
    kept.restart()
    while pulled := kept.pull(max_messages=2):
        of_key = [received for received in pulled if received.message.ordering_key == "k"]
        seen += [message.data for message in of_key]
        kept.ack(pulled)
        kept.restart()
    assert seen == ["2", "3", "4"]


def test_retained_acked_messages_and_topic_logs_can_be_sought(kept: KeptWorld) -> None:
    kept.topic("logged", message_retention_duration={"seconds": 3600})
    kept.subscription("late", "logged")
    kept.subscription(retain_acked_messages=True)
    kept.publish("a")
    kept.publish("b", topic_id="logged")
    kept.ack(kept.pull())
    kept.ack(kept.pull("late"), "late")
    kept.restart()
    assert kept.pull_data() == kept.pull_data("late") == []
    before = {"seconds": int(kept.now_s) - 1}
    seek(kept, time=before)
    kept.call("Seek", "SeekRequest", subscription=subscription_path("late"), time=before)
    kept.restart()
    assert kept.pull_data() == ["a"]
    assert kept.pull_data("late") == ["b"]
    kept.advance(8 * DAY_S)
    kept.flush()
    assert kept.rows() == 0


def test_snapshot_comes_back_and_goes_with_its_messages(kept: KeptWorld) -> None:
    kept.subscription()
    kept.publish("a")
    expires = make_snapshot(kept).expire_time.ToSeconds()
    kept.publish("b")
    kept.ack(kept.pull())
    kept.restart()
    kept.publish("c")
    kept.ack(kept.pull())
    kept.restart()
    seek(kept, snapshot=snapshot_path("before"))
    assert kept.pull_data() == ["a", "b", "c"]
    request = {"snapshot": snapshot_path("before")}
    assert (
        kept.call("GetSnapshot", "GetSnapshotRequest", **request).expire_time.ToSeconds() == expires
    )
    kept.restart()
    kept.ack(kept.pull())
    kept.call("DeleteSnapshot", "DeleteSnapshotRequest", **request)
    kept.flush()
    assert kept.rows() == 0
    kept.restart()
    with pytest.raises(ResourceNotFound):
        kept.call("GetSnapshot", "GetSnapshotRequest", **request)


def test_snapshot_expires_after_a_restart_when_it_was_to(kept: KeptWorld) -> None:
    kept.subscription()
    make_snapshot(kept)
    kept.advance(6 * DAY_S)
    kept.restart()
    kept.advance(DAY_S - 1)
    assert kept.broker.registry.snapshots
    kept.advance(1)
    assert not kept.broker.registry.snapshots


def test_deleted_topic_and_detached_subscription_stay_so(kept: KeptWorld) -> None:
    kept.subscription()
    kept.subscription("detached")
    kept.publish("a")
    kept.call(
        "DetachSubscription",
        "DetachSubscriptionRequest",
        subscription=subscription_path("detached"),
    )
    kept.restart()
    kept.publish("b")
    kept.call("DeleteTopic", "DeleteTopicRequest", topic=topic_path("jobs"))
    kept.restart()
    kept.topic()
    kept.publish("never")
    assert get(kept).topic == "_deleted-topic_"
    assert get(kept, "detached").detached
    assert kept.pull_data() == ["a", "b"]
    assert kept.broker.registry.subscriptions[subscription_path("detached")].backlog.messages == []


def test_deleted_subscription_leaves_nothing_in_the_file(kept: KeptWorld) -> None:
    kept.subscription()
    kept.subscription("second")
    kept.publish("a", "b")
    kept.flush()
    kept.call(
        "DeleteSubscription", "DeleteSubscriptionRequest", subscription=subscription_path("workers")
    )
    kept.flush()
    assert kept.rows() == 2
    kept.call(
        "DeleteSubscription", "DeleteSubscriptionRequest", subscription=subscription_path("second")
    )
    kept.flush()
    assert kept.rows() == 0


def test_message_for_nobody_is_not_written(kept: KeptWorld) -> None:
    kept.publish("a")
    kept.flush()
    assert kept.rows() == 0


def test_withdrawn_messages_leave_everyone_who_holds_them(kept: KeptWorld) -> None:
    kept.topic("logged", message_retention_duration={"seconds": 3600})
    kept.subscription("workers", "logged", retain_acked_messages=True)
    kept.subscription("second", "logged")
    make_snapshot(kept)
    kept.publish("stays", topic_id="logged")
    (refused,) = kept.publish("refused", topic_id="logged")
    kept.ack(kept.pull())
    kept.pull("second")
    kept.broker.registry.withdraw({int(refused)})
    kept.restart()
    assert kept.rows() == 1
    assert kept.pull_data("second") == ["stays"]
    seek(kept, time={"seconds": int(kept.now_s) - 1})
    assert kept.pull_data() == ["stays"]


def test_expiration_counts_from_the_last_use(kept: KeptWorld) -> None:
    kept.subscription(
        expiration_policy={"ttl": {"seconds": 2 * DAY_S}},
        message_retention_duration={"seconds": DAY_S},
    )
    kept.advance(DAY_S * 1.9)
    kept.restart()
    # The hour during which any use may have gone unrecorded.
    kept.advance(DAY_S * 0.1 + 3599)
    get_path = subscription_path("workers")
    assert get_path in kept.broker.registry.subscriptions
    kept.advance(1)
    assert get_path not in kept.broker.registry.subscriptions
    kept.restart()
    assert get_path not in kept.broker.registry.subscriptions


def test_message_past_its_retention_is_gone_after_a_restart(kept: KeptWorld) -> None:
    kept.subscription(message_retention_duration={"seconds": 600})
    kept.publish("a")
    kept.flush()
    kept.now_s += 601
    kept.crash()
    kept.advance(0)
    assert kept.pull_data() == []
