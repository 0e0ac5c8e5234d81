"""IAM policies: stored, returned and guarded by their etag, but not enforced."""

from typing import Any

import pytest

from pubsub_emulator.errors import ChangedMeanwhile, InvalidArgument, ResourceNotFound
from tests.world import (
    PROJECT,
    KeptWorld,
    World,
    snapshot_path,
    subscription_path,
    topic_path,
)

READER = {"role": "roles/pubsub.viewer", "members": ["user:a@example.com"]}
TOPIC = topic_path("jobs")


def get(world: World, resource: str = TOPIC) -> Any:
    return world.call("GetIamPolicy", "GetIamPolicyRequest", resource=resource)


def put(world: World, resource: str = TOPIC, mask: tuple[str, ...] = (), **policy: Any) -> Any:
    fields: dict[str, Any] = {"resource": resource, "policy": policy}
    if mask:
        fields["update_mask"] = {"paths": mask}
    return world.call("SetIamPolicy", "SetIamPolicyRequest", **fields)


def test_policy_that_was_never_set_is_empty(world: World) -> None:
    policy = get(world)
    assert not policy.bindings
    assert policy.etag


@pytest.mark.parametrize("resource", [TOPIC, subscription_path("workers"), snapshot_path("monday")])
def test_each_kind_of_resource_has_a_policy(world: World, resource: str) -> None:
    world.call(
        "CreateSnapshot",
        "CreateSnapshotRequest",
        name=snapshot_path("monday"),
        subscription=subscription_path("workers"),
    )
    world.call(
        "CreateSchema",
        "CreateSchemaRequest",
        parent=PROJECT,
        schema_id="user",
        schema={"type_": "AVRO", "definition": '"string"'},
    )
    put(world, resource, bindings=[READER])
    assert get(world, resource).bindings[0].role == READER["role"]


def test_policy_is_replaced_by_who_read_the_last_one(world: World) -> None:
    first = put(world, bindings=[READER], etag=get(world).etag)
    second = put(world, bindings=[], etag=first.etag)
    assert get(world) == second
    with pytest.raises(ChangedMeanwhile, match="read-modify-write"):
        put(world, bindings=[READER], etag=first.etag)
    assert get(world) == second


def test_policy_without_an_etag_replaces_any(world: World) -> None:
    put(world, bindings=[READER])
    assert not put(world).bindings


def test_mask_keeps_what_it_does_not_name(world: World) -> None:
    put(world, bindings=[READER])
    policy = put(world, mask=("version",), version=1)
    assert policy.version == 1
    assert policy.bindings[0].role == READER["role"]


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"version": 2}, "policy.version"),
        ({"bindings": [{"members": ["user:a@example.com"]}]}, r"policy.bindings\[0\].role"),
        ({"bindings": [READER, {"role": "r", "members": [""]}]}, r"policy.bindings\[1\].members"),
        ({"bindings": [{**READER, "condition": {"expression": "true"}}]}, "version 3"),
        ({"bindings": [{"role": "r", "members": ["user:a"] * 1501}]}, "members count"),
        ({"bindings": [{"role": "r" * 300_000}]}, "size in bytes"),
    ],
)
def test_policy_out_of_bounds_is_refused(world: World, policy: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        put(world, **policy)


def test_mask_of_an_unknown_field_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match=r"bindings\.role is not a field"):
        put(world, mask=("bindings.role",))


def test_every_permission_is_granted_on_what_exists(world: World) -> None:
    permissions = ["pubsub.topics.get", "pubsub.topics.publish"]
    fields = {"resource": TOPIC, "permissions": permissions}
    answer = world.call("TestIamPermissions", "TestIamPermissionsRequest", **fields)
    assert list(answer.permissions) == permissions
    fields["resource"] = topic_path("missing")
    answer = world.call("TestIamPermissions", "TestIamPermissionsRequest", **fields)
    assert list(answer.permissions) == []


@pytest.mark.parametrize("permission", ["", "pubsub.*", "*"])
def test_permission_with_a_wildcard_is_refused(world: World, permission: str) -> None:
    with pytest.raises(InvalidArgument, match="wildcards"):
        world.call(
            "TestIamPermissions",
            "TestIamPermissionsRequest",
            resource=TOPIC,
            permissions=[permission],
        )


@pytest.mark.parametrize("name", ["GetIamPolicy", "SetIamPolicy"])
def test_policy_of_what_is_missing_or_no_resource(world: World, name: str) -> None:
    with pytest.raises(ResourceNotFound, match=r"\(resource=missing\)"):
        world.call(name, f"{name}Request", resource=topic_path("missing"))
    for nonsense in ("", "nonsense", f"{PROJECT}/things/jobs", f"{PROJECT}/topics/1"):
        with pytest.raises(InvalidArgument):
            world.call(name, f"{name}Request", resource=nonsense)


def test_policy_goes_with_its_resource(world: World) -> None:
    put(world, bindings=[READER])
    world.call("DeleteTopic", "DeleteTopicRequest", topic=TOPIC)
    world.topic()
    assert not get(world).bindings


def test_policy_is_there_after_a_restart(kept: KeptWorld) -> None:
    policy = put(kept, bindings=[READER])
    put(kept, topic_path("dead"), bindings=[READER])
    kept.call("DeleteTopic", "DeleteTopicRequest", topic=topic_path("dead"))
    kept.restart()
    assert get(kept) == policy
    kept.topic("dead")
    assert not get(kept, topic_path("dead")).bindings
