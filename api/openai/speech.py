"""POST /v1/audio/speech as in OpenAI's API, either complete or as events.

A class that yields files can be streamed, with each file as the next part of the audio. Without
streaming, callers receive all files concatenated. Work is measured in characters.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.bodies import strip_mark
from api.dispatch.request import InferenceRequest
from api.http.call import ModelCall
from api.http.fast_route import StreamedRoute
from api.http.inference import Inference
from api.http.openapi import binary
from api.http.recording import Recording
from api.http.request_options import wants_event_ids
from api.http.router import Router
from api.http.streaming import answer_events, begin_events
from api.openai.audio_schemas import SpeechBody
from api.openai.chat import failure_event
from api.openai.images import read_blob
from api.predictions.creation import digest_of
from api.predictions.generation_stream import (
    AddedText,
    GenerationStreams,
    StreamShape,
    parse_last_event_id,
)
from api.tasks.base import Inputs, check_results
from api.tasks.custom import FieldNames, input_of_fields
from shared.errors import BadInput, ModelFailed, PenstockError
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog
from shared.models.tasks.custom import (
    CustomInput,
    CustomResult,
    build_streamed_key,
    interface_of,
    read_elements,
)
from shared.stores.objects import ObjectStore

SPEECH = "/v1/audio/speech"
SPEECH_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
"""Media type by `response_format`. Opus audio is stored in an Ogg file."""
MAX_PIECE_BYTES = 64 * 1024 * 1024
_ANY_BYTES = "application/octet-stream"
_STORED = re.compile(rb'"audio":"","key":"([^"]+)"')
_encode = msgspec.json.Encoder().encode


class CharacterUsage(msgspec.Struct):
    """A text's usage."""

    characters: int
    type: Literal["characters"] = "characters"


class SpeechDelta(msgspec.Struct, omit_defaults=True):
    """The next part of the audio, in base64."""

    type: str
    audio: str
    key: str = ""
    """Key of a large part, which is in the object store until it is sent."""


class SpeechDone(msgspec.Struct):
    """The final event of a stream."""

    usage: CharacterUsage
    type: Literal["speech.audio.done"] = "speech.audio.done"


def _delta(audio: str, key: str = "") -> bytes:
    event = SpeechDelta("speech.audio.delta", audio, key)
    return b"data: " + _encode(event) + b"\n\n"


class SpeechEvents(StreamShape):
    """The events for spoken text: one per audio part, plus a final one."""

    def __init__(self, record: str, names: FieldNames) -> None:
        self._record = record
        self._names = names

    def delta(self, added: AddedText) -> bytes | None:
        """Returns one event per part, each a line of JSON."""
        files = [file for element in read_elements(added.text) for file in element.files]
        return b"".join(
            _delta(file.uri.partition(",")[2])
            if file.uri
            else _delta("", build_streamed_key(self._record, added.generation, file))
            for file in files
        )

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the event with the usage."""
        results = (outcome.result for outcome in outcomes)
        (spoken,) = check_results(results, CustomResult, self._names.model)
        done = SpeechDone(CharacterUsage(spoken.work))
        return [b"data: " + _encode(done) + b"\n\n"]

    def failure(self, error: PenstockError) -> bytes:
        """Returns an error that uses the caller's field name."""
        return failure_event(self._names.error(error))


async def _with_sound(events: AsyncGenerator[bytes], objects: ObjectStore) -> AsyncGenerator[bytes]:
    """Yields events, fetching audio parts from the object store."""
    try:
        async for event in events:
            for stored in reversed(list(_STORED.finditer(event))):
                part = await objects.get(stored[1].decode(), MAX_PIECE_BYTES)
                audio = b'"audio":"%s"' % base64.b64encode(part)
                event = event[: stored.start()] + audio + event[stored.end() :]
            yield event
    except PenstockError as error:
        yield failure_event(error)
    finally:
        await events.aclose()


class _Asked(msgspec.Struct):
    stream_format: str | None = None


_asked_decoder = msgspec.json.Decoder(_Asked)


class SpeechRoute(StreamedRoute):
    """A route whose body may request a stream."""

    async def asks_for_stream(self, request: Request) -> bool:
        try:
            body = _asked_decoder.decode(strip_mark(await request.body()))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return False
        return body.stream_format == "sse"


router = Router(scope="audio", route_class=SpeechRoute)


@router.post(
    SPEECH,
    summary="Create speech",
    response_class=Response,
    body=SpeechBody,
    answers={200: binary("The sound.", *sorted({*SPEECH_TYPES.values(), _ANY_BYTES}))},
    is_streamed=True,
)
async def create_speech(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    generation_streams: GenerationStreams,
    objects: ObjectStore,
) -> Response:
    """Returns all of the audio in the requested format, or streams it part by part as events.

    With an `Idempotency-Key`, each event has an ID. To continue after an event, on any instance,
    send the same request with the same key and the event's ID as `Last-Event-ID`.
    """
    body = await call.read_json(SpeechBody)
    model = call.serving(catalog, "speech", body.model)
    is_streamed = body.stream_format == "sse"
    values = body.model_dump(exclude={"model", "stream_format"})
    known = interface_of(model)
    if is_streamed and not known.streams:
        reason = f"must be audio, because {model.name} does not stream"
        raise BadInput(f"stream_format: {reason}", field="stream_format")
    if is_streamed and "stream" in known.properties:
        values["stream"] = True
    speech_input, _ = input_of_fields(values, model, {})
    speech_input.is_streamed = is_streamed
    names = FieldNames(model, "input", {"stream": "stream_format"})
    with names.translate_errors():
        if is_streamed:
            inference.check_room(call, model, 1)
            stream = _SpeechStream(call, names, recording, generation_streams, objects)
            return await stream.answer(body, speech_input)
        async with inference.compute(
            call, model, [speech_input], is_repeatable=model.deterministic
        ) as response:
            data = await _sound_of(response.outcomes, objects)
    file_format = body.response_format or known.properties.get("response_format", {}).get(
        "default", ""
    )
    return Response(data, media_type=SPEECH_TYPES.get(file_format, _ANY_BYTES))


async def _sound_of(outcomes: Sequence[ItemOutcome], objects: ObjectStore) -> bytes:
    """Returns the audio in a result by concatenating its files."""
    (outcome,) = outcomes
    if outcome.result is None or not outcome.result.blobs:
        raise ModelFailed("the model did not return an audio file")
    return b"".join([await read_blob(objects, blob, "sound") for blob in outcome.result.blobs])


@dataclass(frozen=True, slots=True)
class _SpeechStream:
    """Responds with the audio parts as events, starting after `Last-Event-ID`.

    Args:
        names: field names to use in error messages.
    """

    call: ModelCall
    names: FieldNames
    recording: Recording
    streams: GenerationStreams
    objects: ObjectStore

    async def answer(self, body: SpeechBody, item: CustomInput) -> Response:
        """Creates the prediction, or finds it if it already exists, and returns its events.

        Raises:
            BadInput: `Last-Event-ID` is not an event ID of this stream.
            PenstockError: the prediction failed before its first event.
        """
        call = self.call
        last_id = call.http.headers.get("last-event-id", "")
        seen = parse_last_event_id(last_id, 1)
        new = self._request(body, item)
        with ExitStack() as held:
            held.enter_context(self.streams.room.reserve(call.tenant))
            snapshot = await self.recording.start(call, new)
            shape = SpeechEvents(snapshot.prediction.record, self.names)
            has_ids = wants_event_ids(call.http.headers)
            if last_id:
                events = self.streams.follow(
                    snapshot,
                    shape,
                    seen,
                    call.check_key,
                    stays=False,
                    has_ids=has_ids,
                    has_elements=True,
                )
            else:
                events = await begin_events(
                    call, self.streams, snapshot, shape, seen, has_ids=has_ids, has_elements=True
                )
            location = f"/v1/predictions/{snapshot.prediction.id}"
            return answer_events(_with_sound(events, self.objects), held, location)

    def _request(self, body: SpeechBody, item: CustomInput) -> InferenceRequest:
        """Returns the request to create the prediction described by a body."""
        model = self.names.model
        fields = body.model_dump(mode="json", exclude_unset=True)
        read = Inputs([item], fields, is_list=False, is_repeatable=model.deterministic)
        digest = digest_of(json.dumps([model.name, SPEECH, repr(item.cache_form())]))
        return self.recording.request(self.call, model, read, digest=digest, endpoint=SPEECH)
