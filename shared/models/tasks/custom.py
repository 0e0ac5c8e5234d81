"""Custom models, which use Cog's interface.

A penstock.schema.json describes the inputs and the output.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import msgspec

from shared.errors import MALFORMED, BadInput, ModelFailed
from shared.models.blob import FILE_FORMAT, INLINE_LIMIT_BYTES, RESULTS, Blob
from shared.models.entry import CatalogEntry, ServedApi
from shared.models.flow_types import StepSchema
from shared.models.interface import SECRET_FORMAT, ModelInterface
from shared.models.tasks.base import (
    FirstGuesses,
    LinkTo,
    StepInput,
    Task,
    TaskInput,
    TaskResult,
    WorkBound,
)

MAX_FILES = 32
"""Maximum number of files in one prediction or flow step item. Any of them may be in the message.
"""
MAX_MESSAGE_JSON_BYTES = 1024 * 1024
"""Maximum size, in bytes, of an output's or input's JSON in a message. Larger JSON goes to the
object store.
"""
JSON_TYPE = "application/json"
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
"""The range of 64-bit integers, signed or unsigned."""

_encoder = msgspec.json.Encoder()

_OTHER_SUFFIXES = {"audio/wav": ".wav", "audio/mp3": ".mp3"}
"""File extensions for media types that Python does not know."""

API_INPUTS: Mapping[ServedApi, Mapping[str, str]] = {
    "transcription": {
        "file": "file",
        "language": "string",
        "prompt": "string",
        "temperature": "number",
        "task": "string",
        "word_timestamps": "boolean",
    },
    "speech": {
        "input": "string",
        "voice": "string",
        "instructions": "string",
        "response_format": "string",
        "speed": "number",
        "stream": "boolean",
    },
    "ocr": {
        "document": "file",
        "pages": "string",
        "table_format": "string",
        "include_image_base64": "boolean",
        "image_limit": "integer",
        "image_min_size": "integer",
        "include_blocks": "boolean",
        "confidence_scores_granularity": "string",
        "extract_header": "boolean",
        "extract_footer": "boolean",
    },
}
"""The inputs that an endpoint sets, with their types. A class must have at least the first input.

Set by api/openai/audio.py, api/openai/speech.py, and api/mistral/ocr.py.
"""
_ELEMENTS: Mapping[ServedApi, str] = {"transcription": "segments", "ocr": "pages"}
"""The elements a class yields, keyed by endpoint."""


class FilePlace(msgspec.Struct, frozen=True, array_like=True):
    """The position of a file in an input or output, where null takes its place."""

    at: list[str | int]
    """The path to the file: field names and element numbers."""
    name: str = "file"
    digest: str = ""
    """Digest of a streamed file's data."""


class StreamedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file in an element of a streamed list, with its position in that element."""

    at: list[str | int]
    media_type: str
    number: int
    """The file's number among all files in the output, starting at 0."""
    digest: str
    uri: str = ""
    """A `data:` URI. Empty if the file is in the object store (`streamed_suffix`)."""


class StreamedElement(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An element of a streamed list, with null in place of each file.

    In the text of a stream, each element is a line of JSON.
    """

    value: Any
    files: list[StreamedFile] = []

    @property
    def line(self) -> str:
        """Returns the element as it appears in a stream."""
        return _encoder.encode(self).decode() + "\n"

    def to_json_value(self, link_to: Callable[[StreamedFile], str]) -> Any:
        """Returns the element with URIs for its files, ready for JSON."""
        uris = [file.uri or link_to(file) for file in self.files]
        return _with_files(self.value, [file.at for file in self.files], uris)


class PieceChunk(msgspec.Struct, omit_defaults=True):
    """Consecutive pieces of an output yielded by a class.

    `first`: number of pieces before this chunk. `text`: the concatenated pieces. For a list, each
    piece is a line (StreamedElement). `lengths`: number of characters per piece.
    """

    first: int
    text: str = ""
    lengths: list[int] = msgspec.field(default_factory=list)

    @property
    def end(self) -> int:
        """Number of pieces up to and including this chunk."""
        return self.first + len(self.lengths)

    @property
    def pieces(self) -> list[str]:
        ends = [*accumulate(self.lengths, initial=0)]
        return [self.text[start:end] for start, end in pairwise(ends)]

    def until(self, count: int) -> PieceChunk:
        """Returns the first pieces, up to `count` of them."""
        text = self.text[: sum(self.lengths[:count])]
        return PieceChunk(self.first, text, self.lengths[:count])

    def since(self, first: int) -> PieceChunk:
        """Returns the pieces from number `first` on, counted from the start of the output."""
        skipped = first - self.first
        text = self.text[sum(self.lengths[:skipped]) :]
        return PieceChunk(first, text, self.lengths[skipped:])


_element_decoder = msgspec.json.Decoder(StreamedElement)


def read_elements(text: str) -> list[StreamedElement]:
    """Parses the elements from a stream's lines."""
    # JSON does not contain LF, but it may contain other characters that `splitlines` treats as line
    # breaks.
    return [_element_decoder.decode(line) for line in text.split("\n")[:-1]]


def make_streamed_file(at: list[str | int], number: int, digest: str, file: Blob) -> StreamedFile:
    """Returns a file in the form used in streams. A small file is included in the stream."""
    is_small = file.data is not None and len(file.data) <= INLINE_LIMIT_BYTES
    uri = _data_uri(file) if is_small else ""
    return StreamedFile(at, file.media_type, number, digest, uri)


def format_piece(piece: Any) -> str:
    """Returns a piece as text for its stream: None becomes empty, and other values become JSON."""
    if isinstance(piece, str):
        return piece
    return "" if piece is None else json.dumps(piece, ensure_ascii=False)


def file_digest(data: bytes) -> str:
    """Returns a streamed file's digest: 128 bits of BLAKE2b (RFC 7693)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def build_streamed_key(record: str, index: int, file: StreamedFile) -> str:
    """Returns a streamed file's key in the object store, before the result exists."""
    return f"{RESULTS}/{record}/{index}.{file.number}-{file.digest}"


def find_unsendable(value: Any) -> str:
    """Describes the parts of plain values that messages or responses can't represent.

    Empty if there are none. The values may be deeply nested.
    """
    pending = [value]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            pending += current.keys()
            pending += current.values()
        elif isinstance(current, list | tuple):
            pending += current
        elif isinstance(current, float) and not math.isfinite(current):
            return "NaN or an infinite number, which JSON can't represent"
        elif isinstance(current, str) and not _is_unicode(current):
            return "a lone surrogate, which JSON can't represent"
        elif isinstance(current, int) and not MIN_INTEGER <= current <= MAX_INTEGER:
            return "an integer with more than 64 bits"
    return ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class CustomResult(TaskResult, tag="custom"):
    """One prediction's output."""

    output: Any
    files: list[Blob] = msgspec.field(default_factory=list)
    places: list[FilePlace] = msgspec.field(default_factory=list)
    """Positions of files in the output."""
    streams: str = ""
    """Same as in the model's interface."""
    metrics: dict[str, Any] = msgspec.field(default_factory=dict)
    """Metrics recorded by the class."""
    work: int = 1
    """The item's weight."""
    is_packed: bool = False
    """True if `files` contains only the output, as JSON, because it is too large for a message.

    Release 0.1.0 shows such an output as a link.
    """
    packed_files: list[Blob] = msgspec.field(default_factory=list)
    """The files in a packed output."""
    packed_places: list[FilePlace] = msgspec.field(default_factory=list)

    def find_wrong_number(self) -> str:
        """Describes the part of the output or metrics that can't be sent."""
        return find_unsendable(self.output) or find_unsendable(self.metrics)

    def unpack(self) -> Self:
        """Returns the result with its output as values, if it is packed and its data is inline.

        Raises:
            ModelFailed: the class sent something other than an output.
        """
        data = self.files[0].data if self.is_packed else None
        if data is None:
            return self
        try:
            output = msgspec.json.decode(data)
            _with_files(output, [place.at for place in self.packed_places], self.packed_places)
        except (*MALFORMED, LookupError, TypeError, OverflowError) as error:
            raise ModelFailed("output: must be the JSON that the class declared") from error
        return msgspec.structs.replace(
            self,
            output=output,
            files=self.packed_files,
            places=self.packed_places,
            is_packed=False,
            packed_files=[],
            packed_places=[],
        )

    @property
    def recorded_metrics(self) -> Mapping[str, Any]:
        return self.metrics

    @classmethod
    def count_truncated(cls, results: Sequence[TaskResult], *, is_asked: bool) -> int | None:
        """Returns None, because a class's tokens are not known."""
        return None

    @property
    def blobs(self) -> Sequence[Blob]:
        return [*self.files, *self.packed_files]

    def with_blobs(self, blobs: Sequence[Blob]) -> Self:
        """Returns the same output with its files replaced."""
        count = len(self.files)
        files, packed = list(blobs[:count]), list(blobs[count:])
        return msgspec.structs.replace(self, files=files, packed_files=packed)

    def blob_suffix(self, number: int) -> str:
        """Returns the suffix in `build_streamed_key` for a file stored before the others exist."""
        digest = "" if self.is_packed else self.places[number].digest
        return f".{number}-{digest}" if digest else super().blob_suffix(number)

    def to_output(self, media_type: str, link_to: LinkTo) -> Any:
        """Returns the output with `data:` URIs for small files and URLs for others.

        If a packed output's data is stored elsewhere, the output is a URL.
        """
        if self.is_packed:
            if (key := self.files[0].object_key) is not None:
                return link_to(key, JSON_TYPE)
            assert self.files[0].data is not None, "has neither data nor a key; this is a bug"
            return self.unpack().to_output(media_type, link_to)
        if not self.files:
            return self.output
        uris = [_format_uri(file, link_to) for file in self.files]
        return _with_files(self.output, [place.at for place in self.places], uris)

    def step_value(self) -> Any:
        """Returns the output with a Blob for each file.

        Streamed text is joined into a single string.
        """
        if self.streams == "text":
            return self.text
        return _with_files(self.output, [place.at for place in self.places], self.files)

    @property
    def text(self) -> str:
        """A streamed output in stream form: text, or one line of JSON per element."""
        if self.streams == "text":
            return "".join(map(format_piece, self.output))
        files: dict[int, list[StreamedFile]] = {}
        for number, (place, file) in enumerate(zip(self.places, self.files, strict=True)):
            element, *at = place.at
            streamed = make_streamed_file(at, number, place.digest, file)
            files.setdefault(int(element), []).append(streamed)
        return "".join(
            StreamedElement(value, files.get(number, [])).line
            for number, value in enumerate(self.output)
        )

    @property
    def logprobs(self) -> list[Any]:
        """Empty, because an output's pieces are not tokens."""
        return []

    @property
    def streamed_tokens(self) -> int:
        return len(self.output)


class CustomInput(TaskInput, tag="custom"):
    """One prediction's input: plain values, plus files and their positions."""

    values: dict[str, Any]
    files: list[Blob] = msgspec.field(default_factory=list)
    places: list[FilePlace] = msgspec.field(default_factory=list)
    """Positions of the files."""
    is_streamed: bool = False
    """True if the output's pieces are streamed as they are computed."""
    compared_with: CustomResult | None = None
    """A canary's output to compare with, if this input is being recomputed for comparison."""
    context: dict[str, str] = msgspec.field(default_factory=dict)
    """Available to the class as `current_scope().context`."""

    @property
    def sources(self) -> Sequence[Blob]:
        return self.files

    def with_sources(self, sources: Sequence[Blob]) -> Self:
        """Returns the same input with its files replaced."""
        return msgspec.structs.replace(self, files=list(sources))

    def step_value(self) -> dict[str, Any]:
        """Returns the values with a Blob for each file, as a flow's steps see them."""
        return dict(_with_files(self.values, [place.at for place in self.places], self.files))

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns the maximum weight, because only the worker knows the actual weight."""
        return entry.work.max or 1

    def cache_form(self) -> tuple[object, ...]:
        """Returns all values, and the digests of files."""
        written = json.dumps(self.values, sort_keys=True)
        files = (
            (json.dumps(place.at), place.name, file.identity)
            for place, file in zip(self.places, self.files, strict=True)
        )
        context = (json.dumps(self.context, sort_keys=True),) if self.context else ()
        return ("custom", written, *files, *context)


def with_places(value: Any) -> tuple[Any, list[Blob], list[FilePlace]]:
    """Returns the value with null for each Blob, plus the Blobs and their positions."""
    files, places = list[Blob](), list[FilePlace]()
    return _without_files(value, [], files, places), files, places


def _without_files(
    value: Any, at: list[str | int], files: list[Blob], places: list[FilePlace]
) -> Any:
    if isinstance(value, Blob):
        files.append(value)
        places.append(FilePlace(at, "file" + usual_suffix(value)))
        return None
    if isinstance(value, Mapping):
        return {
            name: _without_files(field, [*at, name], files, places) for name, field in value.items()
        }
    if isinstance(value, list):
        return [
            _without_files(element, [*at, number], files, places)
            for number, element in enumerate(value)
        ]
    return value


def usual_suffix(file: Blob) -> str:
    """Returns the usual extension for this type of file.

    Many programs use it to determine the file type.
    """
    known = mimetypes.guess_extension(file.media_type, strict=False)
    return known or _OTHER_SUFFIXES.get(file.media_type, "")


def _with_files(value: Any, places: Sequence[list[str | int]], uris: Sequence[Any]) -> Any:
    """Returns a copy of a value with URIs in these positions.

    This is a copy because the value may be shown again with different URIs.
    """
    if not places:
        return value
    whole: dict[str, Any] = {"output": msgspec.json.decode(msgspec.json.encode(value))}
    for at, uri in zip(places, uris, strict=True):
        container: Any = whole
        path = ["output", *at]
        for part in path[:-1]:
            container = container[part]
        container[path[-1]] = uri
    return whole["output"]


def _format_uri(file: Blob, link_to: LinkTo) -> str:
    return _data_uri(file) or link_to(file.object_key, file.media_type)


def _data_uri(file: Blob) -> str:
    """Returns a file as a URI. Empty if the file is in the object store."""
    if file.data is None:
        return ""
    return f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}"


class CustomTask(Task):
    """Custom classes.

    The unit of work is the weight that a custom model assigns to an item, usually 1.
    """

    name = "custom"
    noun = "a custom model"
    unit = "work"
    precisions = ("auto",)
    first_guesses: ClassVar = FirstGuesses(item_s=1.0, gap_s=0.05, batch_s=0.1)
    stores_blobs = True
    has_interface = True

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sets the maximum number of items to the class's concurrency.

        A class with `predict_batch` accepts any number.
        """
        interface = fields.get("interface")
        if isinstance(interface, ModelInterface):
            interface = {"batches": interface.batches, "concurrency": interface.concurrency}
        if not isinstance(interface, Mapping):
            return {"batch": {"max_items": 1}}
        if interface.get("batches"):
            return {"batch": {}}
        return {"batch": {"max_items": interface.get("concurrency", 1)}}

    def check_entry(self, entry: CatalogEntry) -> None:
        """Validates the entry. The class determines how many items it processes at a time."""
        if entry.backend != "auto":
            raise ValueError(f"{self.noun} does not support backend; omit it")
        interface = interface_of(entry)
        _check_work(entry, interface)
        if interface.batches and entry.work.max_s is not None:
            raise ValueError(
                "work.max_s: can't be combined with predict_batch, whose batches are stopped "
                "after 5 minutes; remove it"
            )
        if entry.api is not None:
            _check_api(entry.api, interface)
        if interface.batches:
            _check_key(entry.batch.key, interface)
            return
        if entry.batch.key is not None:
            raise ValueError("batch.key: requires a class with predict_batch; omit it otherwise")
        if entry.batch.max_items > interface.concurrency:
            raise ValueError(
                f"batch.max_items: must be at most {interface.concurrency}, the number of items "
                "that the class processes at a time (concurrency.max in its cog.yaml, or "
                "predict_batch)"
            )

    def budget(self, entry: CatalogEntry) -> int:
        return entry.batch.max_work or entry.batch.max_items * (entry.work.max or 1)

    def runs_to_the_end(self, entry: CatalogEntry) -> bool:
        """Returns True for a class without `predict_batch`. Batches are limited to five minutes."""
        return not interface_of(entry).batches

    def tolerance(self, entry: CatalogEntry) -> float:
        """Returns 0, because outputs must be equal, or close enough as judged by the class."""
        return 0.0

    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        """Returns the schemas in the model's penstock.schema.json.

        Streamed text is a single string.
        """
        interface = interface_of(entry)
        output = {"type": "string"} if interface.streams == "text" else interface.output
        return StepSchema(interface.inputs, output)

    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        """Returns all inputs. The class's process validates their values."""
        interface = interface_of(entry)
        if unknown := [name for name in values if name not in interface.properties]:
            raise BadInput(f"{unknown[0]}: is not an input of {entry.name}", field=unknown[0])
        for name in interface.inputs.get("required", ()):
            if name not in values:
                raise BadInput(f"{name}: {entry.name} needs it", field=name)
        plain, files, places = with_places(values)
        if len(files) > MAX_FILES:
            field = str(places[MAX_FILES].at[0])
            raise BadInput(f"{field}: an item may have at most {MAX_FILES} files", field=field)
        return StepInput(CustomInput(plain, files, places), entry.deterministic)

    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        return WorkBound(entry.work.max or 1)


def are_equal(ours: CustomResult, theirs: CustomResult) -> bool:
    """Returns whether two outputs are equal, including their files' data."""
    both = (ours.unpack(), theirs.unpack())
    first, second = ((result.output, result.files) for result in both)
    return first == second


def interface_of(entry: CatalogEntry) -> ModelInterface:
    """Returns a custom model's interface.

    Raises:
        ValueError: the entry has no interface, because no catalog was read.
    """
    if entry.interface is None:
        raise ValueError("the model's interface is unknown; run penstock models check")
    return entry.interface


def streams_of(entry: CatalogEntry) -> str:
    """Returns how a prediction's output grows, as in the interface.

    Empty unless the model is a class.
    """
    return "" if entry.interface is None else entry.interface.streams


def stores_files(entry: CatalogEntry) -> bool:
    """Returns whether a custom model or a flow may return files, which are stored."""
    return entry.interface is not None and _has_files(entry.interface.output)


def _has_files(schema: object) -> bool:
    """Returns whether a value of this JSON Schema may contain a file."""
    if isinstance(schema, Mapping):
        is_file = schema.get("format") == FILE_FORMAT
        return is_file or any(_has_files(part) for part in schema.values())
    return isinstance(schema, list) and any(_has_files(part) for part in schema)


def _check_work(entry: CatalogEntry, interface: ModelInterface) -> None:
    """Checks that the work limits are set if and only if the class weighs its items.

    Raises:
        ValueError: the limits are missing or superfluous.
    """
    max_work = entry.work.max
    if interface.weighs and max_work is None:
        raise ValueError(
            "work.max: is required because the class has work(); set it to the maximum work "
            "of an input"
        )
    if not interface.weighs and (max_work is not None or entry.batch.max_work is not None):
        raise ValueError(
            "work.max, batch.max_work: require a class with work(); omit them otherwise"
        )


def check_flow_api(api: ServedApi, interface: ModelInterface) -> None:
    """Raises ValueError if an endpoint can't call a flow or read its output."""
    _check_inputs(api, interface)
    output = interface.output
    if api == "ocr" and _gives_pages_apart(output):
        return
    if (_kind(output), _kind(output.get("items", {}))) != ("array", "object"):
        alternative = ", or pages and numbers" if api == "ocr" else ""
        raise ValueError(
            f"api: {api}: the flow must return a list of {_ELEMENTS[api]}{alternative}"
        )


def _check_api(api: ServedApi, interface: ModelInterface) -> None:
    """Raises ValueError if an endpoint can't call a class or read its output."""
    _check_inputs(api, interface)
    element = interface.output.get("items", {})
    if api in _ELEMENTS and (interface.streams, _kind(element)) != ("items", "object"):
        raise ValueError(
            f"api: {api}: the class must return Iterator[dict[str, Any]], its {_ELEMENTS[api]}"
        )
    output = element if interface.streams else interface.output
    if api == "speech" and (interface.streams == "text" or _kind(output) != "file"):
        raise ValueError(
            f"api: {api}: the class must return Path (the speech file) or Iterator[Path]"
        )


def _check_inputs(api: ServedApi, interface: ModelInterface) -> None:
    known = API_INPUTS[api]
    first, required = next(iter(known)), interface.inputs.get("required", ())
    if first not in interface.properties:
        raise ValueError(f"api: {api}: the class must have an input named {first!r}")
    if more := [name for name in required if name != first]:
        raise ValueError(
            f"api: {api}: the input {more[0]!r} must have a default because the endpoint "
            "does not set it"
        )
    for name, kind in known.items():
        shape = interface.properties.get(name)
        if shape is not None and (is_kind := _kind(shape)) != kind:
            raise ValueError(f"api: {api}: the input {name!r} must be a {kind}, not a {is_kind}")


def _gives_pages_apart(output: Mapping[str, Any]) -> bool:
    """True if a flow returns each page's text separately, along with page numbers."""
    fields = output.get("properties", {})
    pages, numbers = (fields.get(name, {}).get("items", {}) for name in ("pages", "numbers"))
    of_a_page = (_kind(pages), _kind(pages.get("items", {})))
    return (*of_a_page, _kind(numbers)) == ("array", "object", "integer")


def _kind(shape: Mapping[str, Any]) -> str:
    """Returns the type in a JSON Schema generated by Cog, as one word."""
    if "anyOf" in shape:
        return _kind(shape["anyOf"][0])
    return "file" if shape.get("format") == FILE_FORMAT else str(shape.get("type", "any value"))


def _check_key(key: str | None, interface: ModelInterface) -> None:
    """Checks that a batch key is an input whose values can be compared.

    Raises:
        ValueError: the key is not an input, or its values can't be compared.
    """
    if key is None:
        return
    plain = [
        name
        for name, shape in interface.properties.items()
        if not {shape.get("format"), shape.get("items", {}).get("format")}
        & {FILE_FORMAT, SECRET_FORMAT}
    ]
    if key not in plain:
        raise ValueError(
            f"batch.key: {key!r} is not an input with comparable values; use one of "
            f"{', '.join(plain) or 'none'}"
        )


CUSTOM = CustomTask()
