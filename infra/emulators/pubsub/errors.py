"""The errors of the embedded Pub/Sub, with the service's wording.

The servicer turns them into gRPC statuses.

PubsubError
├── InvalidArgument
│   └── AckIdsRefused
├── ResourceNotFound
├── ResourceExists
├── FailedPrecondition
├── ResourceExhausted
├── Unimplemented
└── ServerUnavailable
"""

from collections.abc import Mapping

INVALID_ACK_ID = "PERMANENT_FAILURE_INVALID_ACK_ID"


class PubsubError(Exception):
    """A request was refused. `status` is the name of its gRPC status code."""

    status = "INTERNAL"


class InvalidArgument(PubsubError):
    """The request is wrong whatever the state of the server."""

    status = "INVALID_ARGUMENT"


class AckIdsRefused(InvalidArgument):
    """Some ack ids of an exactly-once subscription are no longer valid.

    `reasons` maps each refused ack id to its reason. It travels as the metadata of a
    `google.rpc.ErrorInfo`.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(
            "Some acknowledgment ids in the request were invalid. This could be because the "
            "acknowledgment ids have expired or the acknowledgment ids were malformed."
        )
        self.reasons = dict(reasons)


class ResourceNotFound(PubsubError):
    """The named resource does not exist."""

    status = "NOT_FOUND"


class ResourceExists(PubsubError):
    """A resource of this name exists."""

    status = "ALREADY_EXISTS"


class FailedPrecondition(PubsubError):
    """The resource is in a state that forbids this."""

    status = "FAILED_PRECONDITION"


class ResourceExhausted(PubsubError):
    """The server holds as many bytes as it may."""

    status = "RESOURCE_EXHAUSTED"


class Unimplemented(PubsubError):
    """The service can do this and the embedded server cannot."""

    status = "UNIMPLEMENTED"


class ServerUnavailable(PubsubError):
    """The server is stopping, or cannot write to its disk. Clients retry."""

    status = "UNAVAILABLE"


def resource_not_found(path: str) -> ResourceNotFound:
    """Return the refusal for a resource that does not exist. `path` is `projects/…/<kind>/<id>`."""
    return ResourceNotFound(f"Resource not found (resource={path.rpartition('/')[2]}).")


def resource_exists(path: str) -> ResourceExists:
    """Return the refusal for a name that is taken. `path` is `projects/…/<kind>/<id>`."""
    return ResourceExists(
        f"Resource already exists in the project (resource={path.rpartition('/')[2]})."
    )
