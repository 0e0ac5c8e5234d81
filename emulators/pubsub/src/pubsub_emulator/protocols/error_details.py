"""Details sent with an error in addition to its status and message."""

from google.rpc import error_details_pb2

from pubsub_emulator.errors import PubsubError

FAILED = "The embedded server failed because of a bug. Its log has the traceback."
_DOMAIN = "pubsub.googleapis.com"


def error_info(error: PubsubError) -> error_details_pb2.ErrorInfo:
    """Return the complete `ErrorInfo` for an error that has a reason.

    The list is never shortened, because clients assume that every requested ack ID missing from it
    was confirmed. The service lists up to 4 MiB of IDs, so Google's clients raise gRPC's limit of 8
    KiB; other clients get RESOURCE_EXHAUSTED from their own gRPC library, and no ID is considered
    confirmed. Source: https://github.com/googleapis/python-pubsub/pull/623
    """
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=error.metadata)
