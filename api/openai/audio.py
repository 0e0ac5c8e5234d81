"""POST /v1/audio/transcriptions and /v1/audio/translations, directly and in batches.

Custom models with the matching `api` in their entries produce the transcripts. Their inputs and
outputs are described in shared/models/tasks/custom.py. A transcriber streams segments, so its
response can be streamed too. A streamed response is a prediction, as with chats. Work and `usage`
are measured in seconds of audio.

A batch line specifies its recording by URL in `url`, as in Groq's API
(https://console.groq.com/docs/batch), or by upload ID in `file`. OpenAI's batches do not support
audio.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import PurePath
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from api.batches.documents import LineUsage
from api.batches.endpoint import Endpoint, LineCaller, LineRequest, ReplyTools
from api.dispatch.request import InferenceRequest
from api.errors import BodyTooLarge
from api.http.call import ModelCall
from api.http.connection import while_connected
from api.http.fast_route import StreamedRoute
from api.http.inference import Inference
from api.http.openapi import (
    Responses,
    ref_to,
)
from api.http.recording import Recording
from api.http.request_options import wants_event_ids
from api.http.router import Router
from api.http.streaming import answer_events, begin_events
from api.http.upload_form import MAX_EDIT_FIELDS, form_asks_for_stream, open_form
from api.inputs.source_images import ImageCaller, SourceImages
from api.inputs.storage import Storage
from api.openai.audio_schemas import (
    FILE,
    LISTS,
    MAX_FILE_BYTES,
    DurationUsage,
    Task,
    TranscribedElement,
    TranscribedSegment,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionForm,
    TranscriptionLine,
    TranscriptionReply,
    TranslationForm,
    TranslationLine,
    VerboseTranscriptionReply,
)
from api.openai.chat import failure_event
from api.predictions.creation import PredictionSnapshot, digest_of
from api.predictions.generation_stream import (
    HEARTBEAT,
    HEARTBEAT_BESIDE_IDS,
    AddedText,
    GenerationStreams,
    StreamPosition,
    StreamShape,
    StreamTooLong,
    behind,
    find_return,
    follow_record,
    parse_last_event_id,
)
from api.predictions.progress import PredictionProgress
from api.predictions.service import Predictions
from api.tasks.base import Inputs, check_results
from api.tasks.custom import FieldNames, add_files, input_of_fields
from shared.errors import BadInput, ModelFailed, PenstockError
from shared.messages import ItemOutcome
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Flow, Model
from shared.models.flow_plan import MAX_STEP_ITEMS
from shared.models.tasks.custom import (
    CustomInput,
    CustomResult,
    FilePlace,
    interface_of,
    read_elements,
)

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
MAX_FIELD_BYTES = 64 * 1024
_LINE_REPLY_BYTES = 256 * 1024
_WINDOW_ID = re.compile(r"\d{1,9}")
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")
_ANY_BYTES = "application/octet-stream"
_FORM_LIMITS = {"max_files": 4, "max_fields": MAX_EDIT_FIELDS, "max_part_size": MAX_FIELD_BYTES}
_NAMES = {"task": "model", "word_timestamps": "timestamp_granularities"}
"""Maps class inputs to form fields that have different names."""
_encode = msgspec.json.Encoder().encode
F = TypeVar("F", bound=TranslationForm)


class _Upload(NamedTuple):
    """An uploaded file.

    A class sees only the file extension, so that identical files are identical inputs.
    """

    data: bytes
    name: str


async def _read_form(call: ModelCall, kind: type[F]) -> tuple[F, _Upload | None]:
    """Returns a form's validated fields, and its file unless it has a `url`.

    Raises:
        BadInput: there is not exactly one file, or it is empty or too large.
    """
    call.check_charset()
    async with _open_form(call.http) as form:
        fields = kind.model_validate(_fields_of(form))
        if fields.url is None:
            return fields, await _only_file(form)
        if FILE in form:
            raise BadInput(
                f"url: can't be combined with {FILE}; send only one of them", field="url"
            )
        return fields, None


def _check_is_form(request: Request) -> None:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadInput("content-type: must be multipart/form-data", field="content-type")


@asynccontextmanager
async def _open_form(request: Request) -> AsyncIterator[FormData]:
    _check_is_form(request)
    async with open_form(request, **_FORM_LIMITS) as form:
        yield form


def _fields_of(form: FormData) -> dict[str, Any]:
    """Returns all non-empty fields except the file, keyed by name. Lists may be sent as `NAME[]`.

    Raises:
        BadInput: a field was sent twice, or as a file.
    """
    fields: dict[str, Any] = {}
    for sent_as, value in form.multi_items():
        bare = sent_as.removesuffix("[]")
        name = bare if bare in LISTS else sent_as
        if name == FILE or value == "":
            continue
        if isinstance(value, UploadFile):
            is_known = name in TranscriptionForm.model_fields
            reason = "must not be a file" if is_known else "unknown parameter"
            raise BadInput(f"{sent_as[:80]}: {reason}", field=sent_as[:80])
        if name in LISTS:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise BadInput(f"{name[:80]}: must be sent only once", field=name[:80])
        else:
            fields[name] = value
    return fields


async def _only_file(form: FormData) -> _Upload:
    files = form.getlist(FILE)
    if len(files) != 1:
        reason = f"exactly one file or url is required, got {len(files)} files"
        raise BadInput(f"{FILE}: {reason}", field=FILE)
    if not isinstance(files[0], UploadFile):
        raise BadInput(f"{FILE}: must be a file, not text", field=FILE)
    size = files[0].size or 0
    if size > MAX_FILE_BYTES:
        raise BodyTooLarge(
            f"{FILE}: must be at most {MAX_FILE_BYTES} bytes, got {size}", field=FILE
        )
    if not size:
        raise BadInput(f"{FILE}: must not be empty", field=FILE)
    return _Upload(await files[0].read(), _name_of(files[0].filename or ""))


def _name_of(filename: str) -> str:
    suffix = PurePath(filename).suffix.lower()
    return f"recording{suffix if _SUFFIX.fullmatch(suffix) else ''}"


def _read_input(form: TranslationForm, model: Model, mode: Task) -> CustomInput:
    """Returns a transcriber's input, without its file.

    Raises:
        pydantic.ValidationError: the class does not accept a value.
        BadInput: the class does not accept a field.
    """
    values = {
        "prompt": form.prompt,
        "temperature": form.temperature,
        "task": mode if mode != "transcribe" else None,
    }
    if isinstance(form, TranscriptionForm):
        values |= {"language": form.language, "word_timestamps": form.wants_words or None}
    item = _validate(values | {FILE: "data:"}, model)
    item.is_streamed = isinstance(form, TranscriptionForm) and form.stream
    return item


async def _add_recording(
    item: CustomInput, field: str, url: str, caller: ImageCaller, images: SourceImages
) -> None:
    """Loads an input's recording.

    Args:
        url: URL of the recording, or an upload's ID.

    Raises:
        BadInput: the file does not exist, or fetching it is not allowed.
        Overloaded: too many files are being fetched.
        Unavailable: the object store is unreachable.
    """
    try:
        await add_files(item, [([FILE], url)], caller, images)
    except BadInput as error:
        reason = error.message.removeprefix(f"{FILE}: ")
        raise type(error)(f"{field}: {reason}", field=field) from error
    item.places[:] = [FilePlace(place.at, _name_of(place.name)) for place in item.places]


def _names_for(model: Model, field: str) -> FieldNames:
    """Returns the names of a form's fields. `field` contains the recording."""
    return FieldNames(model, field, _NAMES | {FILE: field})


def _validate(values: Mapping[str, Any], model: Model) -> CustomInput:
    """Returns a class's input without files. None values are omitted."""
    if values.get("task") is not None and "task" not in interface_of(model).properties:
        raise BadInput(f"model: {model.name} does not support translation", field="model")
    return input_of_fields(values, model, _NAMES)[0]


def _elements(output: Any) -> list[TranscribedElement]:
    try:
        return msgspec.convert(output, list[TranscribedElement])
    except msgspec.ValidationError as error:
        raise ModelFailed(f"the model did not return a valid transcript: {error}") from error


def _text_in(lines: str) -> str:
    """Returns the text of segments, each a line of JSON."""
    values = [entry.value for entry in read_elements(lines)]
    return "".join(element.text for element in _elements(values))


class _Transcript:
    """The output of a transcriber.

    Raises:
        ModelFailed: the output is not a transcript.
    """

    def __init__(self, outcomes: Sequence[ItemOutcome], model: Model) -> None:
        (result,) = check_results((outcome.result for outcome in outcomes), CustomResult, model)
        self.elements = _elements(result.output)
        seconds = result.work
        if isinstance(model, Flow):  # a flow has no unit of work
            seconds = max(1, math.ceil(self.elements[0].duration)) if self.elements else 1
        self.usage = DurationUsage(seconds)
        self.text = "".join(element.text for element in self.elements).lstrip()

    @property
    def spoken(self) -> list[TranscribedElement]:
        return [element for element in self.elements if element.text.strip()]


def _subtitles(
    transcript: _Transcript, mark: str, written: Callable[[str], str] = str
) -> Iterator[str]:
    """Yields the segments with their timestamps.

    Args:
        mark: separator between seconds and milliseconds.
        written: converts text to the output format.
    """
    for element in transcript.spoken:
        # An empty line would end the segment.
        text = " ".join(element.text.split())
        yield f"{_time(element.start, mark)} --> {_time(element.end, mark)}\n{written(text)}\n"


def _time(at_s: float, mark: str) -> str:
    seconds, ms = divmod(round(at_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}{mark}{ms:03}"


def _srt(transcript: _Transcript) -> str:
    """Returns the transcript in the SubRip (.srt) format."""
    cues = _subtitles(transcript, ",")
    return "\n".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1))


def _vtt(transcript: _Transcript) -> str:
    """Returns the transcript as WebVTT (https://www.w3.org/TR/webvtt1/).

    Text is escaped, so it can't contain tags or arrows.
    """
    cues = _subtitles(transcript, ".", partial(html.escape, quote=False))
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
            TranscribedSegment(**{name: getattr(element, name) for name in fields} | {"id": number})
            for number, element in enumerate(transcript.spoken)
        ]
    if "word" in wanted:
        reply.words = [word for element in transcript.spoken for word in element.words]
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


class TranscriptEvents(StreamShape):
    """A transcript's events: one per segment, and one with the whole text.

    Args:
        names: field names to use in error messages.
    """

    def __init__(self, names: FieldNames) -> None:
        self._names = names
        self._has_begun = False
        """True once the text sent so far contains more than spaces."""

    def delta(self, added: AddedText) -> bytes | None:
        """Returns one event per segment, each a line of JSON."""
        text = _text_in(added.text)
        if not self._has_begun:
            self._has_begun = bool(_text_in(added.before).strip())
        text = text if self._has_begun else text.lstrip()
        return _event(TranscriptDelta(text)) if text else None

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the event with the whole text."""
        transcript = _Transcript(outcomes, self._names.model)
        return [_event(TranscriptDone(transcript.text, transcript.usage))]

    def failure(self, error: PenstockError) -> bytes:
        """Returns an error that uses the caller's field name."""
        return failure_event(self._names.error(error))


class _LinesOf(Endpoint):
    """Batch lines whose bodies have the same fields as the form, with the recording's URL or ID."""

    mode: ClassVar[Task]
    body_type: ClassVar[type[TranscriptionLine | TranslationLine]]

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item. The recording is loaded when the line runs."""
        body = self.body_type.model_validate_json(data, strict=True)
        model = catalog.serving("transcription", body.model)
        item = _read_input(body, model, self.mode)
        return LineRequest(body, model, [item], model.deterministic, _LINE_REPLY_BYTES)

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[CustomInput]:
        """Loads the recording.

        This happens on each attempt, but an unchanged file is not loaded again.
        """
        body = cast(TranscriptionLine | TranslationLine, request.body)
        item = _read_input(body, request.model, self.mode)
        owner = caller.file_owner(FILE)
        await _add_recording(item, *body.recording, owner, caller.source_images)
        return [item]

    def words(self, request: LineRequest) -> AbstractContextManager[None]:
        """Makes errors refer to the body's fields."""
        body = cast(TranscriptionLine | TranslationLine, request.body)
        return _names_for(request.model, body.recording[0]).translate_errors()

    def usage(
        self,
        request: LineRequest,
        outcomes: Sequence[ItemOutcome],
        answered: Sequence[ItemOutcome],
    ) -> LineUsage:
        """Counts seconds of audio."""
        seconds = _Transcript(answered, request.model).usage.seconds
        return super().usage(request, outcomes, answered)._replace(audio_seconds=seconds)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the transcript in the requested format. Formats other than JSON are strings."""
        body = cast(TranscriptionLine | TranslationLine, request.body)
        answer = _answer(body, _Transcript(outcomes, request.model), self.mode)
        data = bytes(answer.body)
        return data if answer.media_type == "application/json" else _encode(data.decode())


class TranscriptionsEndpoint(_LinesOf):
    """Recordings to transcribe."""

    mode, body_type = "transcribe", TranscriptionLine


class TranslationsEndpoint(_LinesOf):
    """Recordings to translate into English."""

    mode, body_type = "translate", TranslationLine


class AudioRoute(StreamedRoute):
    """A route whose form may request a stream."""

    async def asks_for_stream(self, request: Request) -> bool:
        _check_is_form(request)
        return await form_asks_for_stream(request, **_FORM_LIMITS)


router = Router(scope="audio", route_class=AudioRoute)


_TRANSCRIPT: Responses = {
    200: {
        "description": "The result.",
        "content": {
            "application/json": {
                "schema": {"anyOf": [ref_to(TranscriptionReply), ref_to(VerboseTranscriptionReply)]}
            },
            "text/plain": {"schema": {"type": "string"}},
            "text/vtt": {"schema": {"type": "string"}},
        },
        "headers": {},
    }
}


@router.post(
    TRANSCRIPTIONS,
    summary="Transcribe a recording",
    form=TranscriptionForm,
    answers=_TRANSCRIPT,
    is_streamed=True,
    lines=TranscriptionsEndpoint(),
)
async def create_transcription(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    storage: Storage,
    source_images: SourceImages,
    predictions: Predictions,
    progress: PredictionProgress,
    generation_streams: GenerationStreams,
) -> Response:
    """Returns the whole transcript or, with `stream`, one segment at a time.

    With an `Idempotency-Key`, the events of a stream have IDs. To continue after an event, on any
    instance, send the same request with the same key and the event's ID as `Last-Event-ID`.
    """
    form, upload = await _read_form(call, TranscriptionForm)
    model = call.serving(catalog, "transcription", form.model)
    transcriber = _Transcriber(call, form, model, "transcribe", inference, recording)
    with transcriber.names.translate_errors():
        item = await transcriber.load(upload, storage, source_images)
        if not form.stream:
            return await transcriber.answer(item)
        stream = _TranscriptStream(
            call, transcriber.names, recording, predictions, progress, generation_streams
        )
        return await stream.answer(await transcriber.prediction_request(item))


@router.post(
    TRANSLATIONS,
    summary="Translate a recording into English",
    form=TranslationForm,
    answers=_TRANSCRIPT,
    lines=TranslationsEndpoint(),
)
async def create_translation(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    storage: Storage,
    source_images: SourceImages,
) -> Response:
    form, upload = await _read_form(call, TranslationForm)
    model = call.serving(catalog, "transcription", form.model)
    transcriber = _Transcriber(call, form, model, "translate", inference, recording)
    with transcriber.names.translate_errors():
        return await transcriber.answer(await transcriber.load(upload, storage, source_images))


class _Transcriber:
    """Transcribes one request's recording.

    Args:
        mode: what the endpoint does with the recording.
    """

    def __init__(
        self,
        call: ModelCall,
        form: TranslationForm,
        model: Model,
        mode: Task,
        inference: Inference,
        recording: Recording,
    ) -> None:
        self._call = call
        self._form = form
        self._model = model
        self._mode = mode
        self._inference = inference
        self._recording = recording
        self.names = _names_for(model, FILE if form.url is None else "url")
        """Field names, for errors."""

    async def load(
        self, upload: _Upload | None, storage: Storage, source_images: SourceImages
    ) -> CustomInput:
        """Returns the input with its recording.

        Args:
            upload: the recording. None if the form has a URL instead.

        Raises:
            BadInput: the class does not accept a field, or the recording can't be loaded.
            Overloaded: there is no capacity, or too many files are being fetched.
            Unavailable: the object store is unreachable.
        """
        call, model, form, inference = self._call, self._model, self._form, self._inference
        item = _read_input(form, model, self._mode)
        inference.check_room(call, model, 1)
        if upload is not None:
            await inference.preparation(call, model).begin()
            item.files.append(
                await source_images.store_large_source(Blob(_ANY_BYTES, data=upload.data))
            )
            item.places.append(FilePlace([FILE], upload.name))
        if form.url is not None:
            quota = storage.quota_of(call.caller, FILE)
            owner = inference.file_owner(call, model, quota, call.prediction_stops_at_s(model))
            adding = _add_recording(item, "url", form.url, owner, source_images)
            await while_connected(call.http, adding)
        return item

    async def answer(self, item: CustomInput) -> Response:
        """Returns the whole transcript as a response.

        Raises:
            PenstockError: the model failed, or the request was rejected.
        """
        call, model = self._call, self._model
        run_request = partial(self.prediction_request, item)
        async with self._recording.compute(
            call, model, [item], run_request, is_repeatable=model.deterministic
        ) as delivery:
            return _answer(self._form, _Transcript(delivery.outcomes, model), self._mode)

    async def prediction_request(self, item: CustomInput) -> InferenceRequest:
        """Returns the request to create the prediction described by the form."""
        model = self._model
        fields = {FILE: item.places[0].name} | self._form.model_dump(
            mode="json", exclude_unset=True
        )
        read = Inputs([item], fields, is_list=False, is_repeatable=model.deterministic)
        identity = [model.name, TRANSCRIPTIONS, repr(item.cache_form())]
        digest = digest_of(json.dumps(identity))
        return self._recording.request(
            self._call, model, read, digest=digest, endpoint=TRANSCRIPTIONS
        )


class _TranscriptStream:
    """Responds with a transcript's events, starting after `Last-Event-ID`.

    Args:
        names: field names to use in error messages.
    """

    def __init__(
        self,
        call: ModelCall,
        names: FieldNames,
        recording: Recording,
        predictions: Predictions,
        progress: PredictionProgress,
        streams: GenerationStreams,
    ) -> None:
        self._call = call
        self._model = names.model
        self._shape = TranscriptEvents(names)
        self._recording = recording
        self._predictions = predictions
        self._progress = progress
        self._streams = streams
        self._last_id = call.http.headers.get("last-event-id", "")
        self._has_ids = wants_event_ids(call.http.headers)

    async def answer(self, new: InferenceRequest) -> Response:
        """Creates the prediction, or finds the existing one, and returns its events.

        Args:
            new: the request to create the prediction.

        Raises:
            BadInput: `Last-Event-ID` is not an event ID of this stream.
            PenstockError: the prediction failed before its first event.
        """
        call, model = self._call, self._model
        is_flow = isinstance(model, Flow)
        if is_flow and self._last_id and not _WINDOW_ID.fullmatch(self._last_id):
            raise BadInput(
                f"Last-Event-ID: {self._last_id[:40]!r} is not an event ID of this stream",
                field="last-event-id",
            )
        seen = [] if is_flow else parse_last_event_id(self._last_id, 1)
        with ExitStack() as held:
            held.enter_context(self._streams.room.reserve(call.tenant))
            snapshot = await self._recording.start(call, new)
            if isinstance(model, Flow):
                events = self._flow_events(snapshot, model)
                opening = await while_connected(call.http, anext(events, b""))
                sse = behind(opening, events)
            else:
                sse = await self._events(snapshot, seen)
            return answer_events(sse, held, f"/v1/predictions/{snapshot.prediction.id}")

    async def _events(
        self, snapshot: PredictionSnapshot, seen: Sequence[StreamPosition]
    ) -> AsyncGenerator[bytes]:
        """Returns a transcriber's events, one per segment."""
        call, streams, has_ids = self._call, self._streams, self._has_ids
        if not self._last_id:
            return await begin_events(
                call, streams, snapshot, self._shape, seen, has_ids=has_ids, has_elements=True
            )
        return streams.follow(
            snapshot,
            self._shape,
            seen,
            call.check_key,
            stays=False,
            has_ids=has_ids,
            has_elements=True,
        )

    async def _flow_events(self, first: PredictionSnapshot, flow: Flow) -> AsyncGenerator[bytes]:
        """Yields a flow's events: one per window, in order, as soon as the window is transcribed.

        If the reader hangs up and can't resume, the run is canceled.
        """
        call, has_ids = self._call, self._has_ids
        windows = _WindowEvents(flow, int(self._last_id or -1), has_ids=has_ids)
        returns = find_return(call.options.idempotency_key, has_positions=has_ids)
        is_left = returns == "never"
        try:
            async for snapshot in follow_record(self._predictions, first, call.check_key):
                outcomes = await self._progress.step_outcomes(snapshot, windows.seen)
                for event in windows.of(outcomes):
                    yield event
                if snapshot.record.is_over:
                    is_left = False
                else:
                    yield HEARTBEAT_BESIDE_IDS if has_ids else HEARTBEAT
            if not snapshot.record.is_over:
                if not has_ids:
                    raise StreamTooLong
                return
            if snapshot.record.state != "succeeded" or snapshot.record.reply is None:
                raise snapshot.failure
            for event in self._shape.closing(snapshot.record.reply.delivered, 0.0):
                yield event
        except PenstockError as error:
            yield self._shape.failure(error)
        finally:
            if is_left:
                self._streams.leave(first.prediction, 0.0)


class _WindowEvents:
    """A flow's window events. `seen`: number of the last event the reader received."""

    def __init__(self, flow: Flow, seen: int, *, has_ids: bool) -> None:
        order = flow.plan.order()
        self._hears = [flow.step_models[number].api == "transcription" for number in order]
        self._has_ids, self._said = has_ids, seen >= 0
        self.seen = seen

    def of(self, outcomes: Sequence[tuple[int, ItemOutcome]]) -> Iterator[bytes]:
        """Yields an event for each window with text."""
        for number, outcome in outcomes:
            self.seen, result = number, outcome.result
            if not self._hears[number // MAX_STEP_ITEMS] or not isinstance(result, CustomResult):
                continue
            text = "".join(element.text for element in _elements(result.output))
            if text.strip():
                delta = _event(TranscriptDelta(text if self._said else text.lstrip()))
                yield (f"id: {number}\n".encode() if self._has_ids else b"") + delta
                self._said = True
