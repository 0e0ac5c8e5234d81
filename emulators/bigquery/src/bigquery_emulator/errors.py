"""The embedded BigQuery's errors, with the wording and format that the service uses.

ServiceError               any of the errors below
├── InvalidError           400 invalid: an invalid request
├── InvalidQueryError      400 invalidQuery: SQL that can't be parsed or run
├── NotFoundError          404 notFound
├── DuplicateError         409 duplicate
├── InUseError             400 resourceInUse: a dataset that still contains tables
├── ConditionError         412 conditionNotMet: the etag has changed
├── TooLargeError          413 requestTooLarge or uploadTooLarge
├── BusyError              403 rateLimitExceeded: too many jobs at once
├── BytesBilledError       400 bytesBilledLimitExceeded
├── StoppedError           499 stopped: a job that was canceled or ran out of time
├── UnsupportedError       501 notImplemented: the service supports it, this server doesn't
├── ResourcesError         400 resourcesExceeded: not enough memory
├── UnavailableError       503 backendError: a failed write that may succeed if retried
└── BugError               500 bug: a bug in this server. The reason keeps clients from retrying

Source: https://docs.cloud.google.com/bigquery/docs/error-messages
"""

import logging
from typing import Any

import duckdb

from bigquery_emulator.duckdb_words import message_of

log = logging.getLogger(__name__)
_NO_SPACE = "No space left on device"


class ServiceError(Exception):
    """An error with its HTTP status, and the service's reason and location."""

    status = 500
    reason = "internalError"
    grpc_status = "INTERNAL"

    def __init__(self, message: str, location: str | None = None) -> None:
        # A name in it may contain an unpaired surrogate, which a response can't contain.
        self.message = message.encode("utf-8", "replace").decode()
        super().__init__(self.message)
        self.location = location

    def proto(self) -> dict[str, Any]:
        """Returns the ErrorProto for a job's `status.errorResult`."""
        proto: dict[str, Any] = {"reason": self.reason, "message": self.message}
        if self.location is not None:
            proto["location"] = self.location
        return proto

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the HTTP response."""
        detail: dict[str, Any] = {
            "message": self.message,
            "domain": "global",
            "reason": self.reason,
        }
        if self.location is not None:
            detail |= {"location": self.location, "locationType": "other"}
        return {
            "error": {
                "code": self.status,
                "message": self.message,
                "errors": [detail],
                "status": self.grpc_status,
            }
        }


class InvalidError(ServiceError):
    """The request is invalid."""

    status, reason, grpc_status = 400, "invalid", "INVALID_ARGUMENT"


class InvalidQueryError(ServiceError):
    """The SQL can't be parsed or run."""

    status, reason, grpc_status = 400, "invalidQuery", "INVALID_ARGUMENT"

    def __init__(self, message: str, location: str | None = "query") -> None:
        super().__init__(message, location)


class NotFoundError(ServiceError):
    """A resource in the request does not exist."""

    status, reason, grpc_status = 404, "notFound", "NOT_FOUND"


class DuplicateError(ServiceError):
    """The resource to create already exists."""

    status, reason, grpc_status = 409, "duplicate", "ALREADY_EXISTS"


class InUseError(ServiceError):
    """The dataset still contains tables."""

    status, reason, grpc_status = 400, "resourceInUse", "FAILED_PRECONDITION"


class ConditionError(ServiceError):
    """The etag in the request is no longer the resource's current one."""

    status, reason, grpc_status = 412, "conditionNotMet", "FAILED_PRECONDITION"


class TooLargeError(ServiceError):
    """The request body exceeds the service's limit."""

    status, reason, grpc_status = 413, "requestTooLarge", "INVALID_ARGUMENT"


class BusyError(ServiceError):
    """More jobs are waiting than this server allows."""

    status, reason, grpc_status = 403, "rateLimitExceeded", "RESOURCE_EXHAUSTED"


class BytesBilledError(ServiceError):
    """The query would read more than `maximumBytesBilled`."""

    status, reason, grpc_status = 400, "bytesBilledLimitExceeded", "INVALID_ARGUMENT"


class StoppedError(ServiceError):
    """The job was canceled or ran out of time."""

    status, reason, grpc_status = 499, "stopped", "CANCELLED"


class UnsupportedError(ServiceError):
    """The service supports this, but the embedded server does not."""

    status, reason, grpc_status = 501, "notImplemented", "UNIMPLEMENTED"


class ResourcesError(ServiceError):
    """The query or load needs more memory than this server has."""

    status, reason, grpc_status = 400, "resourcesExceeded", "INVALID_ARGUMENT"


class UnavailableError(ServiceError):
    """The server can't write at the moment, for example because the disk is full.

    Retrying may help.
    """

    status, reason, grpc_status = 503, "backendError", "UNAVAILABLE"


class BugError(ServiceError):
    """The embedded server failed in an unexpected way."""

    status, reason, grpc_status = 500, "bug", "INTERNAL"


def is_unavailable(error: Exception) -> bool:
    """Returns True if DuckDB can't read or write its file, for example because the disk is full."""
    # When the disk is full, DuckDB raises one error or the other, depending on whether it notices
    # during a commit or elsewhere.
    is_unwritten = isinstance(error, duckdb.TransactionException) and "Could not write" in str(
        error
    )
    return is_unwritten or isinstance(error, duckdb.IOException)


def as_service_error(error: Exception) -> ServiceError:
    """Converts any exception to one of the service's errors.

    Args:
        error: a ServiceError, one of DuckDB's errors, or any other exception, which is a bug.
    """
    if isinstance(error, ServiceError):
        return error
    text = str(error).split("\n")[0]
    if isinstance(error, RecursionError):
        return InvalidError("The request is nested too deeply")
    if isinstance(error, duckdb.OutOfMemoryException):
        return ResourcesError("Resources exceeded: this server has used up its memory for queries")
    if is_unavailable(error):
        log.warning("the data can't be written or read: %s", text)
        reason = "no space left on disk" if _NO_SPACE in text else "see the server's log"
        return UnavailableError(f"The data can't be read or written: {reason}")
    if isinstance(error, duckdb.DataError | duckdb.IntegrityError | UnicodeDecodeError):
        return InvalidError(f"A value does not fit: {message_of(error)}")
    return BugError(f"This is a bug in the embedded BigQuery: {error!r}")
