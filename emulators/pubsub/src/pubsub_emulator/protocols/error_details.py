"""What goes with a refusal beside its status and its message."""

from google.rpc import error_details_pb2

from pubsub_emulator.errors import PubsubError

FAILED = "The embedded server failed, which is a bug of it. Its log has the trace."
_DOMAIN = "pubsub.googleapis.com"
_BYTES_OF_AN_ENTRY = 8
"""Tags and lengths of a map entry."""


def error_info(error: PubsubError, room_bytes: int) -> error_details_pb2.ErrorInfo:
    """Return the `ErrorInfo` of a refusal that has a reason, with as many entries as have room."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN)
    for key, value in error.metadata.items():
        # The rest is told when the client, which forgets these, asks again.
        room_bytes -= len(key.encode()) + len(value.encode()) + _BYTES_OF_AN_ENTRY
        if room_bytes < 0:
            break
        info.metadata[key] = value
    return info
