"""Streams a prediction's events, from the start or from where a reader left off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from api.errors import ClientGone
from api.http.call import ModelCall
from api.http.connection import while_connected
from api.predictions.creation import PredictionSnapshot
from api.predictions.generation_stream import (
    GenerationStreams,
    StreamPosition,
    StreamShape,
    find_return,
)
from shared.predictions import EVENTS_TYPE

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class HeldResponse(StreamingResponse):
    """A stream that holds resources until it ends, whatever the reason.

    The connection reports a caller who hangs up, so no task waits for Starlette's message.
    """

    def __init__(self, content: AsyncIterable[bytes], held: ExitStack, **options: Any) -> None:
        super().__init__(content, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, suppress(ClientGone):
            await while_connected(Request(scope), _run_apart(self.stream_response(send)))


async def _run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Runs a stream in a separate task, so that an event does not resume every caller above it."""
    await asyncio.create_task(work)


def answer_events(
    events: AsyncGenerator[bytes], held: ExitStack, location: str = ""
) -> HeldResponse:
    """Returns a response with these events. Owns `held` until the last event is sent.

    Args:
        location: URL for rereading the stream, if there is one.
    """
    headers = _HEADERS | ({"location": location} if location else {})
    return HeldResponse(events, held.pop_all(), headers=headers, media_type=EVENTS_TYPE)


def answer_head() -> Response:
    """Returns the response to a HEAD request for an event stream, whose body would never end."""
    return Response(headers=_HEADERS, media_type=EVENTS_TYPE)


async def begin_events(
    call: ModelCall,
    streams: GenerationStreams,
    snapshot: PredictionSnapshot,
    shape: StreamShape,
    seen: Sequence[StreamPosition],
    *,
    has_ids: bool,
    has_numbers: bool = False,
    has_elements: bool = False,
) -> AsyncGenerator[bytes]:
    """Returns a new prediction's events as soon as the first one is known.

    Args:
        has_numbers: True if readers can resume after a numbered event.

    Raises:
        PenstockError: the prediction failed before its first event. ClientGone: the caller hung up.
    """
    returns = find_return(call.options.idempotency_key, has_positions=has_ids or has_numbers)
    beginning = streams.begin(
        snapshot,
        shape,
        seen,
        call.check_key,
        returns,
        has_ids=has_ids,
        has_elements=has_elements,
    )
    return await while_connected(call.http, beginning)
