"""The gRPC layer: method tables of the services, and errors as gRPC statuses."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.rpc import status_pb2

from infra.emulators.pubsub.calls.broker import Broker
from infra.emulators.pubsub.errors import PubsubError
from infra.emulators.pubsub.protocols.error_details import FAILED, error_info
from infra.emulators.pubsub.protocols.methods import SUBSCRIBER, unary_methods
from infra.emulators.pubsub.protos import message_class
from infra.emulators.pubsub.streaming import streaming_pull

_MAX_DETAILS_BYTES = 4096
"""Base64 makes a third more of it. gRPC drops all metadata of a reply above 8 KiB."""
_log = logging.getLogger(__name__)

Handle = Callable[[Any, Any], Awaitable[Any]]


def service_handlers(broker: Broker) -> "list[grpc.GenericRpcHandler[Any, Any]]":
    """Return the handlers of all services, for `Server.add_generic_rpc_handlers`."""

    async def handle_streaming_pull(requests: AsyncIterator[Any], context: Any) -> None:
        await streaming_pull(broker, requests, context)

    services: dict[str, dict[str, Any]] = {}
    for method in unary_methods(broker):
        services.setdefault(method.service, {})[method.name] = grpc.unary_unary_rpc_method_handler(
            _refusing(method.answer), request_deserializer=method.request.FromString
        )
    services[SUBSCRIBER]["StreamingPull"] = grpc.stream_stream_rpc_method_handler(
        _refusing(handle_streaming_pull),
        request_deserializer=message_class("StreamingPullRequest").FromString,
        response_serializer=lambda response: response.SerializeToString(),
    )
    return [
        grpc.method_handlers_generic_handler(service, handlers)
        for service, handlers in services.items()
    ]


def _refusing(handle: Handle) -> Handle:
    """Turn a refusal into the status of the call."""

    async def refusing(request: Any, context: Any) -> Any:
        try:
            return await handle(request, context)
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
    status.details.add().Pack(error_info(error, _MAX_DETAILS_BYTES))
    return (("grpc-status-details-bin", status.SerializeToString()),)
