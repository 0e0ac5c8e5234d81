"""Errors that the embedded Pub/Sub raises, with the service's wording.

`protocols` converts them to gRPC statuses and HTTP errors.

PubsubError
├── InvalidArgument
│   ├── AckIdsRefused
│   └── MessageRefused
├── ResourceNotFound
├── ResourceExists
├── ChangedMeanwhile
├── FailedPrecondition
├── ResourceExhausted
├── Unimplemented
└── ServerUnavailable
"""

from collections.abc import Mapping
from types import MappingProxyType

INVALID_ACK_ID = "PERMANENT_FAILURE_INVALID_ACK_ID"


class PubsubError(Exception):
    """A request was rejected. `status` is the name of the error's gRPC status code.

    `reason` and `metadata`, if set, go into the `google.rpc.ErrorInfo` sent with the status.
    """

    status = "INTERNAL"
    reason = ""
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, message: str) -> None:
        super().__init__(_without_surrogates(message))


class InvalidArgument(PubsubError):
    """The request is invalid regardless of the server's state."""

    status = "INVALID_ARGUMENT"


class AckIdsRefused(InvalidArgument):
    """Some of the ack IDs for an exactly-once subscription are no longer valid.

    Args:
        reasons: the reason for rejecting each ack ID.
    """

    reason = "EXACTLY_ONCE_ACKID_FAILURE"

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(
            "Some acknowledgment ids in the request were invalid. This could be because the "
            "acknowledgment ids have expired or the acknowledgment ids were malformed."
        )
        self.metadata = dict(reasons)


class MessageRefused(InvalidArgument):
    """A message does not match its topic's schema, or the schema it is validated against.

    Args:
        encoding: JSON or BINARY.
        kind: AVRO or PROTO.
        why: the reason that the last revision tried reported.
    """

    def __init__(self, encoding: str, kind: str, why: str) -> None:
        super().__init__("Invalid data in message: Message failed schema validation.")
        self.reason = f"INVALID_{encoding}_{kind}_MESSAGE"
        self.metadata = {
            "message": "Message failed schema validation",
            "revisionInfo": _without_surrogates(why),
        }


class ResourceNotFound(PubsubError):
    """The named resource does not exist."""

    status = "NOT_FOUND"


class ResourceExists(PubsubError):
    """A resource with this name already exists."""

    status = "ALREADY_EXISTS"


class ChangedMeanwhile(PubsubError):
    """The resource has changed since the version the request is based on."""

    status = "ABORTED"


class FailedPrecondition(PubsubError):
    """The resource's state does not allow this."""

    status = "FAILED_PRECONDITION"


class ResourceExhausted(PubsubError):
    """A limit has been reached."""

    status = "RESOURCE_EXHAUSTED"


class Unimplemented(PubsubError):
    """The service supports this but the embedded server does not."""

    status = "UNIMPLEMENTED"


class ServerUnavailable(PubsubError):
    """The server is stopping, or cannot write to its disk. Clients retry."""

    status = "UNAVAILABLE"


def _without_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON may contain but gRPC can't send."""
    return text.encode(errors="replace").decode()


def resource_not_found(path: str) -> ResourceNotFound:
    """Return the error for a resource that does not exist; `path` is `projects/…/<kind>/<id>`."""
    return ResourceNotFound(f"Resource not found (resource={path.rpartition('/')[2]}).")


def resource_exists(path: str) -> ResourceExists:
    """Return the error for a name that is already taken; `path` is `projects/…/<kind>/<id>`."""
    return ResourceExists(
        f"Resource already exists in the project (resource={path.rpartition('/')[2]})."
    )
