"""A resource's IAM policy: stored and returned, but not enforced."""

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.names import check_range
from pubsub_emulator.protos import Policy, SetIamPolicyRequest

KIND = "iamPolicies"
MAX_MEMBERS = 1500
"""Source: https://cloud.google.com/iam/quotas#limits"""
MAX_POLICY_BYTES = 256 * 1024
VERSIONS = (0, 1, 3)
"""Source: the `version` field in https://cloud.google.com/iam/docs/reference/rest/v1/Policy"""


class StoredPolicy:
    """A resource's policy in stored form.

    `proto` contains the resource and the policy. `holder` is the policy's number in the journal.
    """

    moment_s = 0.0

    def __init__(self, proto: SetIamPolicyRequest, holder: int) -> None:
        prefix, project, kind, resource_id = proto.resource.split("/")
        self.path = f"{prefix}/{project}/{KIND}/{kind}/{resource_id}"
        self.holder = holder
        self.proto = proto


def check_version(field: str, version: int) -> None:
    """Reject a policy version that does not exist.

    Raises:
        InvalidArgument: the message includes the field and the version.
    """
    if version not in VERSIONS:
        raise InvalidArgument(
            f"The value for {field} is invalid. You passed {version} in the request, but a "
            "policy's version must be 0, 1 or 3."
        )


def check_policy(policy: Policy) -> None:
    """Reject a policy that the service would not accept from anyone.

    Roles and members don't need to exist.

    Raises:
        InvalidArgument: the version does not exist, a condition requires version 3, a binding has
            no role, a member has no name, or a limit is exceeded.
    """
    check_version("policy.version", policy.version)
    check_range("policy size in bytes", policy.ByteSize(), 0, MAX_POLICY_BYTES)
    check_range(
        "policy members count",
        sum(len(binding.members) for binding in policy.bindings),
        0,
        MAX_MEMBERS,
    )
    for number, binding in enumerate(policy.bindings):
        field = f"policy.bindings[{number}]"
        if not binding.role:
            raise InvalidArgument(f"{field}.role must be set.")
        if not all(binding.members):
            raise InvalidArgument(f"{field}.members must not contain empty strings.")
        if binding.HasField("condition") and policy.version != 3:
            raise InvalidArgument(f"{field}.condition requires a policy of version 3.")
