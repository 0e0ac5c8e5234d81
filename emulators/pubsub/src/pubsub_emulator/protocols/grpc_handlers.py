"""The gRPC layer: the services' method tables, and errors as gRPC statuses."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.errors import InvalidArgument, PubsubError
from pubsub_emulator.protocols.error_details import FAILED, error_info
from pubsub_emulator.protocols.methods import SUBSCRIBER, unary_methods
from pubsub_emulator.protos import message_class
from pubsub_emulator.streaming import streaming_pull

_log = logging.getLogger(__name__)

Handle = Callable[[Any, Any], Awaitable[Any]]


def service_handlers(broker: Broker) -> "list[grpc.GenericRpcHandler[Any, Any]]":
    """Return all services' handlers, for `Server.add_generic_rpc_handlers`."""
    streaming_request = message_class("StreamingPullRequest")

    async def handle_streaming_pull(requests: AsyncIterator[bytes], context: Any) -> None:
        parsed = (_parsed(streaming_request, data) async for data in requests)
        await streaming_pull(broker, parsed, context)

    services: dict[str, dict[str, Any]] = {}
    for method in unary_methods(broker):
        services.setdefault(method.service, {})[method.name] = grpc.unary_unary_rpc_method_handler(
            _refusing(method.answer, method.request)
        )
    services[SUBSCRIBER]["StreamingPull"] = grpc.stream_stream_rpc_method_handler(
        _refusing(handle_streaming_pull)
    )
    return [
        grpc.method_handlers_generic_handler(service, handlers)
        for service, handlers in services.items()
    ]


def _parsed(request: Any, data: bytes) -> Any:
    # Parsed here because gRPC responds to invalid requests with UNKNOWN and a Python class name.
    try:
        return request.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            f"The request is not a valid {request.DESCRIPTOR.full_name}: it is truncated or "
            "corrupt, or contains a string that is not valid UTF-8."
        ) from error


def _refusing(handle: Handle, kind: Any = None) -> Handle:
    """Convert errors to the call's status. If given a request class, also parse the request."""

    async def refusing(request: Any, context: Any) -> Any:
        try:
            return await handle(_parsed(kind, request) if kind else request, context)
        except PubsubError as error:
            code = grpc.StatusCode[error.status]
            await context.abort(code, str(error), trailing_metadata=_details(error, code))
        except Exception:
            _log.exception("a call failed, this is a bug")
            await context.abort(grpc.StatusCode.INTERNAL, FAILED)

    return refusing


def _details(error: PubsubError, code: grpc.StatusCode) -> tuple[tuple[str, bytes], ...]:
    if not error.reason:
        return ()
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=str(error))
    status.details.add().Pack(error_info(error))
    return (("grpc-status-details-bin", status.SerializeToString()),)
