"""POST /v1/audio/transcriptions, /v1/audio/translations and /v1/audio/speech, in OpenAI's shape.

Models of one's own compute them, whose entries say so (`api`). What they take and give is in
shared/tasks/custom.py. A transcriber streams segments, so its answer may be streamed too: it is a
prediction then, as of a chat. Its unit of work is a second of sound, which is what `usage` counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from api.errors import BodyTooLarge
from api.http.fast_route import FastRoute, StreamedRoute
from api.http.openapi import (
    INFERRING,
    Responses,
    binary,
    form_body,
    inference_body,
    inference_responses,
    ref_to,
    streamed,
)
from api.http.request import ApiRequest, open_request, while_connected
from api.http.request_options import wants_event_ids
from api.http.upload_form import MAX_EDIT_FIELDS, closed_form
from api.openai.audio_schemas import (
    FILE,
    LISTS,
    MAX_FILE_BYTES,
    DurationUsage,
    SpeechBody,
    Task,
    TranscribedElement,
    TranscribedSegment,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionForm,
    TranscriptionReply,
    TranslationForm,
    VerboseTranscriptionReply,
)
from api.openai.chat import failure_event
from api.openai.images import read_blob
from api.predictions.creation import digest_of
from api.predictions.event_stream import HeldResponse
from api.predictions.generation_stream import seen_from_id
from api.tasks.base import Inputs
from api.tasks.custom import in_fields, input_of_fields
from shared.blob import Blob
from shared.catalog import Model
from shared.errors import BadInput, ModelFailed, PenstockError
from shared.messages import ItemOutcome
from shared.predictions import EVENTS_TYPE
from shared.tasks.custom import CustomInput, CustomResult, FilePlace, interface_of, read_elements
from shared.tasks.text import TokenLogprob

MAX_FIELD_BYTES = 64 * 1024
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")
_ANY_BYTES = "application/octet-stream"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_encode = msgspec.json.Encoder().encode


SPEECH_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
"""The media type of each `response_format`. Opus is in a file of Ogg."""
F = TypeVar("F", bound=TranslationForm)


class _Recording(NamedTuple):
    """An uploaded file. A class sees the end of its name only, so equal files are equal inputs."""

    data: bytes
    name: str


async def _read_form(call: ApiRequest, kind: type[F]) -> tuple[F, _Recording]:
    """Returns the validated fields of a form, and its file.

    Raises:
        ValidationError: a field is wrong.
        BadInput: there is not exactly one file, or it is empty or too large.
    """
    call.check_charset()
    async with _opened_form(call.http) as form:
        fields = _fields_of(form)
        return kind.model_validate(fields), await _only_file(form)


@asynccontextmanager
async def _opened_form(request: Request) -> AsyncIterator[FormData]:
    limits = {
        "max_files": 4,
        "max_fields": MAX_EDIT_FIELDS,
        "max_part_size": MAX_FIELD_BYTES,
    }
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadInput(
            "content-type: a recording is sent as multipart/form-data", field="content-type"
        )
    async with closed_form(request, **limits) as form:
        yield form


def _fields_of(form: FormData) -> dict[str, Any]:
    """The fields but the file, by their names without `[]`. An empty one is none."""
    fields: dict[str, Any] = {}
    for sent_as, value in form.multi_items():
        name = sent_as.removesuffix("[]")
        if name == FILE or value == "":
            continue
        if isinstance(value, UploadFile):
            is_known = name in TranscriptionForm.model_fields
            reason = "this field is not a file" if is_known else "unknown parameter"
            raise BadInput(f"{sent_as[:80]}: {reason}", field=sent_as[:80])
        if name in LISTS:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise BadInput(f"{name[:80]}: it is there twice", field=name[:80])
        else:
            fields[name] = value
    return fields


async def _only_file(form: FormData) -> _Recording:
    files = form.getlist(FILE)
    if len(files) != 1:
        raise BadInput(f"{FILE}: exactly one file is needed, not {len(files)}", field=FILE)
    if not isinstance(files[0], UploadFile):
        raise BadInput(f"{FILE}: a file is needed, not text", field=FILE)
    size = files[0].size or 0
    if size > MAX_FILE_BYTES:
        raise BodyTooLarge(
            f"{FILE}: {size} bytes; at most {MAX_FILE_BYTES} are allowed", field=FILE
        )
    if not size:
        raise BadInput(f"{FILE}: it is empty", field=FILE)
    suffix = PurePath(files[0].filename or "").suffix.lower()
    name = f"recording{suffix if _SUFFIX.fullmatch(suffix) else ''}"
    return _Recording(await files[0].read(), name)


def _transcribed(
    form: TranslationForm, model: Model, recording: _Recording, mode: Task
) -> CustomInput:
    """Returns the input of a transcriber, with the bytes of its file.

    Raises:
        pydantic.ValidationError: the class does not take a value.
        BadInput: the class does not take a field.
    """
    values = {
        "prompt": form.prompt,
        "temperature": form.temperature,
        "task": mode if mode != "transcribe" else None,
    }
    if isinstance(form, TranscriptionForm):
        values |= {"language": form.language, "word_timestamps": form.wants_words or None}
    one = _checked(values | {FILE: "data:"}, model)
    one.files.append(Blob(_ANY_BYTES, data=recording.data))
    one.places.append(FilePlace([FILE], recording.name))
    one.is_streamed = isinstance(form, TranscriptionForm) and form.stream
    return one


_NAMES = {"task": "model", "word_timestamps": "timestamp_granularities"}
"""The fields of a form by the inputs of a class that have other names."""


def _checked(values: Mapping[str, Any], model: Model) -> CustomInput:
    """Returns the input of a class, without files. None is left out."""
    if values.get("task") is not None and "task" not in interface_of(model).properties:
        raise BadInput(f"model: {model.name} does not translate", field="model")
    return input_of_fields(values, model, _NAMES)[0]


def _elements(output: Any) -> list[TranscribedElement]:
    try:
        return msgspec.convert(output, list[TranscribedElement])
    except msgspec.ValidationError as error:
        raise ModelFailed(f"the model gave no transcript: {error}") from error


class _Transcript:
    """What a transcriber gave.

    Args:
        outcomes: with its result.
        model: its model.

    Raises:
        ModelFailed: it is no transcript.
    """

    def __init__(self, outcomes: Sequence[ItemOutcome], model: Model) -> None:
        (outcome,) = outcomes
        result = outcome.result
        if not isinstance(result, CustomResult):
            raise PenstockError(f"{model.name} returned a result that is not its own; a bug")
        self.elements = _elements(result.output)
        self.usage = DurationUsage(result.work)
        self.text = "".join(one.text for one in self.elements).lstrip()

    @property
    def spoken(self) -> list[TranscribedElement]:
        """The segments with text."""
        return [one for one in self.elements if one.text.strip()]


def _subtitles(transcript: _Transcript, mark: str) -> Iterator[str]:
    """Yields the segments with their times. `mark`: between seconds and milliseconds."""
    for one in transcript.spoken:
        # An empty line would end it.
        said = " ".join(one.text.split())
        yield f"{_time(one.start, mark)} --> {_time(one.end, mark)}\n{said}\n"


def _time(at_s: float, mark: str) -> str:
    seconds, ms = divmod(round(at_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}{mark}{ms:03}"


def _srt(transcript: _Transcript) -> str:
    """SubRip, as players read it."""
    cues = _subtitles(transcript, ",")
    return "\n".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1))


def _vtt(transcript: _Transcript) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/). A text has no tags and no end of its own."""
    cues = (cue.replace("&", "&amp;").replace("<", "&lt;") for cue in _subtitles(transcript, "."))
    return "\n".join(["WEBVTT\n", *cues])


def _verbose(
    form: TranslationForm, transcript: _Transcript, mode: Task
) -> VerboseTranscriptionReply:
    wanted: Sequence[str] = ("segment",)
    if isinstance(form, TranscriptionForm):
        wanted = form.timestamp_granularities or wanted
    first = transcript.elements[0] if transcript.elements else TranscribedElement(0.0, 0.0, "")
    fields = TranscribedSegment.__struct_fields__
    reply = VerboseTranscriptionReply(
        "transcribe" if mode == "transcribe" else "translate",
        first.language,
        first.duration,
        transcript.text,
        transcript.usage,
    )
    if "segment" in wanted:
        reply.segments = [
            TranscribedSegment(**{name: getattr(one, name) for name in fields} | {"id": number})
            for number, one in enumerate(transcript.spoken)
        ]
    if "word" in wanted:
        reply.words = [word for one in transcript.spoken for word in one.words]
    return reply


def _answer(form: TranslationForm, transcript: _Transcript, mode: Task) -> Response:
    """Returns a transcript in the requested format."""
    match form.response_format:
        case "text":
            return Response(f"{transcript.text}\n", media_type="text/plain")
        case "srt":
            return Response(_srt(transcript), media_type="text/plain")
        case "vtt":
            return Response(_vtt(transcript), media_type="text/vtt")
        case "verbose_json":
            body = _encode(_verbose(form, transcript, mode))
        case "json":
            body = _encode(TranscriptionReply(transcript.text, transcript.usage))
    return Response(body, media_type="application/json")


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class TranscriptEvents:
    """The events of a transcript: one for each segment, and one with the whole text."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def opening(self, index: int) -> None:
        """Returns nothing: a transcript begins with its text."""

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """Returns the events of the segments in `text`, which has a line of JSON for each."""
        said = "".join(one.text for one in _elements([one.value for one in read_elements(text)]))
        said = said if before else said.lstrip()
        return _event(TranscriptDelta(said)) if said else None

    def ending(self, index: int, result: object) -> list[bytes]:
        """Returns nothing: what ends a transcript is known with all of it."""
        return []

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the event with the whole text."""
        transcript = _Transcript(outcomes, self._model)
        return [_event(TranscriptDone(transcript.text, transcript.usage))]

    def failure(self, error: PenstockError) -> bytes:
        """Returns an error."""
        return failure_event(error)


class AudioRoute(StreamedRoute):
    """A route whose form may ask for a stream."""

    async def asks_for_stream(self, request: Request) -> bool:
        """Returns whether it does."""
        await request.body()  # which both read then
        async with _opened_form(request) as form:
            asked = form.get("stream", "")
            return isinstance(asked, str) and asked.lower() in _TRUE


_TRUE = ("true", "1", "on", "t", "y", "yes")
"""As pydantic reads them."""
router = APIRouter(route_class=AudioRoute)
speech_router = APIRouter(route_class=FastRoute)
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def _transcription_responses(*, is_streamed: bool) -> Responses:
    answers = inference_responses(TranscriptionReply)
    either = [ref_to(TranscriptionReply), ref_to(VerboseTranscriptionReply)]
    answers[200]["content"] = {
        "application/json": {"schema": {"anyOf": either}},
        "text/plain": {"schema": {"type": "string"}},
        "text/vtt": {"schema": {"type": "string"}},
    }
    return streamed(answers) if is_streamed else answers


def _speech_responses() -> Responses:
    answers = inference_responses(TranscriptionReply)
    sound = binary("The sound.", *sorted({*SPEECH_TYPES.values(), _ANY_BYTES}))
    sound["headers"] = answers[200]["headers"]
    return answers | {200: sound}


@router.post(
    TRANSCRIPTIONS,
    summary="Write down what is said in a recording",
    openapi_extra=form_body(TranscriptionForm, INFERRING),
    responses=_transcription_responses(is_streamed=True),
)
async def create_transcription(request: Request) -> Response:
    """Answers with the whole transcript, or with `stream` segment by segment.

    With an `Idempotency-Key` the events of a stream have ids. The same request with the same key,
    and an id as `Last-Event-ID`, goes on after it, on any instance.
    """
    call = open_request(request)
    form, recording = await _read_form(call, TranscriptionForm)
    return await _transcribe(call, form, recording, "transcribe")


@router.post(
    TRANSLATIONS,
    summary="Write down in English what is said in a recording",
    openapi_extra=form_body(TranslationForm, INFERRING),
    responses=_transcription_responses(is_streamed=False),
)
async def create_translation(request: Request) -> Response:
    """Answers with the whole translation."""
    call = open_request(request)
    form, recording = await _read_form(call, TranslationForm)
    return await _transcribe(call, form, recording, "translate")


async def _transcribe(
    call: ApiRequest, form: TranslationForm, recording: _Recording, mode: Task
) -> Response:
    model = call.serving("transcription", form.model)
    with in_fields(model, FILE, "seconds", _NAMES):
        one = _transcribed(form, model, recording, mode)
        call.check_room(model, 1)
        one = one.with_sources([await call.dependencies.source_images.stored(one.files[0])])
        if one.is_streamed:
            return await _stream(call, form, model, one)
        async with call.inferred(model, [one], is_repeatable=model.deterministic) as response:
            return _answer(form, _Transcript(response.outcomes, model), mode)


async def _stream(
    call: ApiRequest, form: TranslationForm, model: Model, one: CustomInput
) -> Response:
    """Returns the events of a transcript, from the one behind `Last-Event-ID` on."""
    last_id = call.http.headers.get("last-event-id", "")
    seen = seen_from_id(last_id, 1)
    shown = {FILE: one.places[0].name} | form.model_dump(mode="json", exclude_unset=True)
    read = Inputs([one], shown, is_list=False, is_repeatable=model.deterministic)
    asked = [model.name, TRANSCRIPTIONS, repr(one.cache_form())]
    digest = digest_of(json.dumps(asked))
    new = call.recorded(model, read, digest=digest, endpoint=TRANSCRIPTIONS)
    streams, shape = call.dependencies.generation_streams, TranscriptEvents(model)
    with ExitStack() as held:
        held.enter_context(streams.reserved(call.tenant))
        async with call.created(new, waits=False) as creation:
            pass
        options: dict[str, Any] = {
            "has_elements": True,
            "has_ids": wants_event_ids(call.http.headers),
        }
        if last_id:
            sse = streams.follow(
                creation.snapshot, shape, seen, call.check_key, stays=False, **options
            )
        else:
            beginning = streams.begin(creation.snapshot, shape, seen, call.check_key, **options)
            sse = await while_connected(call.http.receive, beginning)
        headers = {**_HEADERS, "location": f"/v1/predictions/{creation.snapshot.prediction.id}"}
        return HeldResponse(sse, held.pop_all(), headers=headers, media_type=EVENTS_TYPE)


@speech_router.post(
    "/v1/audio/speech",
    summary="Say a text",
    response_class=Response,
    openapi_extra=inference_body(SpeechBody),
    responses=_speech_responses(),
)
async def create_speech(request: Request) -> Response:
    """Answers with the whole sound, in the format that was asked for."""
    call = open_request(request)
    body = await call.read_json(SpeechBody)
    model = call.serving("speech", body.model)
    one = _checked(body.model_dump(exclude={"model", "stream_format"}), model)
    with in_fields(model, "input", "characters", _NAMES):
        async with call.inferred(model, [one], is_repeatable=model.deterministic) as response:
            (outcome,) = response.outcomes
            if outcome.result is None or len(outcome.result.blobs) != 1:
                raise ModelFailed("the model gave no file with sound")
            data = await read_blob(call.dependencies.objects, outcome.result.blobs[0], "sound")
    shape = interface_of(model).properties.get("response_format", {})
    file_format = body.response_format or shape.get("default", "")
    return Response(data, media_type=SPEECH_TYPES.get(file_format, _ANY_BYTES))
