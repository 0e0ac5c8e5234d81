"""What goes with a refusal beside its status and its message."""

from google.rpc import error_details_pb2

from pubsub_emulator.errors import PubsubError

FAILED = "The embedded server failed, which is a bug of it. Its log has the trace."
_DOMAIN = "pubsub.googleapis.com"


def error_info(error: PubsubError) -> error_details_pb2.ErrorInfo:
    """Return the `ErrorInfo` of a refusal that has a reason, with all of its entries.

    Never a part of them: clients take each ack id of a request that is not named as confirmed. The
    service names up to 4 MiB of them, for which Google's clients raise gRPC's limit of 8 KiB; a
    client that does not gets RESOURCE_EXHAUSTED from its own gRPC, and no id is confirmed.
    Source: https://github.com/googleapis/python-pubsub/pull/623
    """
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=error.metadata)
