"""The IAMPolicy service, on top of the broker's state: policies are stored, but not enforced."""

from typing import Any

from pubsub_emulator.errors import (
    ChangedMeanwhile,
    InvalidArgument,
    ResourceNotFound,
)
from pubsub_emulator.names import check_range
from pubsub_emulator.protos import Policy, SetIamPolicyRequest, message_class
from pubsub_emulator.state.policy import StoredPolicy, check_policy, check_version
from pubsub_emulator.state.registry import Registry

_NEVER_SET_ETAG = bytes([0, 0x20, 0x01])
"""The service's default etag if no policy has been set; in base64, `ACAB`."""
_ETAG_BYTES = 8
_MAX_PERMISSIONS = 100
_FIELDS = frozenset({"version", "bindings", "audit_configs", "etag"})
_TestIamPermissionsResponse = message_class("TestIamPermissionsResponse")


class PolicyCalls:
    """IAM policies for topics, subscriptions, snapshots, and schemas."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def get_iam_policy(self, request: Any) -> Any:
        """Return a resource's policy. The policy is empty if none was set."""
        self._registry.resource(request.resource)
        check_version("options.requested_policy_version", request.options.requested_policy_version)
        return self._policy(request.resource)

    def set_iam_policy(self, request: Any) -> Any:
        """Replace a resource's policy, or the fields in the mask.

        Raises `ChangedMeanwhile` if the request's etag is out of date.
        """
        self._registry.resource(request.resource)
        current = self._policy(request.resource)
        policy = _apply_mask(current, request)
        check_policy(policy)
        if request.policy.etag and request.policy.etag != current.etag:
            raise ChangedMeanwhile(
                "There were concurrent policy changes. Please retry the whole read-modify-write "
                "with exponential backoff."
            )
        holder = self._registry.next_sequence()
        policy.etag = holder.to_bytes(_ETAG_BYTES, "big")
        stored = StoredPolicy(SetIamPolicyRequest(resource=request.resource, policy=policy), holder)
        self._registry.policies[request.resource] = stored
        self._registry.journal.save(stored)
        return policy

    def test_iam_permissions(self, request: Any) -> Any:
        """Return all permissions in the request, because everything is permitted here.

        If the resource does not exist, return no permissions, as the service does.
        """
        check_range("permissions count", len(request.permissions), 0, _MAX_PERMISSIONS)
        for permission in request.permissions:
            if not permission or "*" in permission:
                raise InvalidArgument(
                    f"Invalid permission given (permission={permission}). It must be the name of a "
                    "permission, without wildcards."
                )
        try:
            self._registry.resource(request.resource)
        except ResourceNotFound:
            return _TestIamPermissionsResponse()
        return _TestIamPermissionsResponse(permissions=request.permissions)

    def _policy(self, path: str) -> Policy:
        stored = self._registry.policies.get(path)
        return stored.proto.policy if stored else Policy(etag=_NEVER_SET_ETAG)


def _apply_mask(current: Policy, request: Any) -> Policy:
    policy = Policy()
    paths = request.update_mask.paths
    if not paths:
        policy.CopyFrom(request.policy)
        return policy
    if unknown := set(paths) - _FIELDS:
        raise InvalidArgument(
            f"Invalid update_mask provided in the SetIamPolicyRequest: {min(unknown)} is not a "
            "field of the policy."
        )
    policy.CopyFrom(current)
    request.update_mask.MergeMessage(
        request.policy, policy, replace_message_field=True, replace_repeated_field=True
    )
    return policy
