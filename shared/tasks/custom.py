"""Custom models, in Cog's interface. A penstock.schema.json lists the inputs and the output."""

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

from shared.blob import FILE_FORMAT, INLINE_LIMIT_BYTES, RESULTS, Blob
from shared.catalog_entry import CatalogEntry, ServedApi, Tolerance
from shared.chunk import StreamChunk
from shared.errors import BadInput, ModelFailed
from shared.flow_types import StepSchema
from shared.model_interface import SECRET_FORMAT, ModelInterface
from shared.tasks.base import (
    ExampleRequest,
    FirstGuesses,
    LinkTo,
    StepInput,
    Task,
    TaskInput,
    TaskResult,
    WorkBound,
)

MAX_FILES = 32
"""Of one prediction, or one item of a step of a flow. Each may be in the message."""
MAX_MESSAGE_JSON_BYTES = 1024 * 1024
"""Maximum JSON of an output or an input in a message. Larger JSON is in the object store."""
JSON_TYPE = "application/json"
MAX_INTEGER_BITS = 64

_encoder = msgspec.json.Encoder()

_OTHER_SUFFIXES = {"audio/wav": ".wav", "audio/mp3": ".mp3"}
"""Of media types that Python does not know."""

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
"""The inputs that an endpoint fills, with their types. A class has the first one at least.

api/openai/audio.py, api/openai/speech.py and api/mistral/ocr.py fill them.
"""
_ELEMENTS: Mapping[ServedApi, str] = {"transcription": "segments", "ocr": "pages"}
"""What a class yields."""


class FilePlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a file in an input or an output, where null stands for it."""

    at: list[str | int]
    """The path to it: names of fields and numbers of elements."""
    name: str = "file"
    digest: str = ""
    """Of the bytes of a file that is streamed."""


class StreamedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file in an element of a streamed list, with its place in that element."""

    at: list[str | int]
    media_type: str
    number: int
    """Its number among all files of the output, from 0."""
    digest: str
    uri: str = ""
    """A `data:` URI. Empty: it is in the object store (`streamed_suffix`)."""


class StreamedElement(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An element of a streamed list, where null stands for each file.

    In the text of a stream each is a line of JSON.
    """

    value: Any
    files: list[StreamedFile] = []

    @property
    def line(self) -> str:
        """The element in the text of a stream."""
        return _encoder.encode(self).decode() + "\n"

    def shown(self, link_to: Callable[[StreamedFile], str]) -> Any:
        """The element with URIs of its files, ready for JSON."""
        uris = [file.uri or link_to(file) for file in self.files]
        return _with_files(self.value, [file.at for file in self.files], uris)


class PieceChunk(StreamChunk, omit_defaults=True):
    """Pieces of an output that a class has yielded one after another.

    `ids`: a checksum of each. `text`: the pieces, one behind the other; of a list, each is a line
    (StreamedElement). `lengths`: the number of characters of each. Release 0.1.0 reads it as
    tokens.
    """

    lengths: list[int] = msgspec.field(default_factory=list)

    @property
    def pieces(self) -> list[str]:
        ends = [*accumulate(self.lengths, initial=0)]
        return [self.text[start:end] for start, end in pairwise(ends)]

    def until(self, count: int) -> PieceChunk:
        """The first pieces, at most so many."""
        text = self.text[: sum(self.lengths[:count])]
        return PieceChunk(self.first, self.ids[:count], text, self.lengths[:count])


_element_decoder = msgspec.json.Decoder(StreamedElement)


def read_elements(text: str) -> list[StreamedElement]:
    """Reads the lines of a stream."""
    # JSON has no LF of its own, but other characters that `splitlines` takes for ends of lines.
    return [_element_decoder.decode(line) for line in text.split("\n")[:-1]]


def streamed_file(at: list[str | int], number: int, digest: str, file: Blob) -> StreamedFile:
    """Returns a file as a stream has it. A small one is in the stream itself."""
    is_small = file.data is not None and len(file.data) <= INLINE_LIMIT_BYTES
    uri = _data_uri(file) if is_small else ""
    return StreamedFile(at, file.media_type, number, digest, uri)


def written_piece(piece: Any) -> str:
    """Returns a piece as the text of its stream has it: None is empty, other values are JSON."""
    if isinstance(piece, str):
        return piece
    return "" if piece is None else json.dumps(piece, ensure_ascii=False)


def file_digest(data: bytes) -> str:
    """Returns the digest of a streamed file: 128 bits of BLAKE2b (RFC 7693)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def streamed_key(record: str, index: int, file: StreamedFile) -> str:
    """Returns the key of a streamed file in the object store, before the result is there."""
    return f"{RESULTS}/{record}/{index}.{file.number}-{file.digest}"


def find_unsendable(value: Any) -> str:
    """Returns what no message or answer can carry, in words, of plain values. Empty: nothing.

    The values may be nested deeply.
    """
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif isinstance(one, float) and not math.isfinite(one):
            return "NaN or an infinite number, which JSON does not have"
        elif isinstance(one, str) and not _is_unicode(one):
            return "half of a surrogate pair, which JSON can't carry"
        elif isinstance(one, int) and one.bit_length() > MAX_INTEGER_BITS - (one < 0):
            return f"an integer of more than {MAX_INTEGER_BITS} bits"
    return ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class CustomResult(TaskResult, tag="custom"):
    """The output of one prediction."""

    output: Any
    files: list[Blob] = msgspec.field(default_factory=list)
    places: list[FilePlace] = msgspec.field(default_factory=list)
    """Of each file in the output."""
    streams: str = ""
    """As in the interface of the model."""
    metrics: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the class recorded."""
    work: int = 1
    """What the item weighed."""
    is_packed: bool = False
    """True if `files` has only the output, as JSON, because it is too large for a message.

    Release 0.1.0 shows such an output as a link.
    """
    packed_files: list[Blob] = msgspec.field(default_factory=list)
    """The files in a packed output."""
    packed_places: list[FilePlace] = msgspec.field(default_factory=list)

    def find_wrong_number(self) -> str:
        """Returns what can't be sent of the output or of what the class recorded."""
        return find_unsendable(self.output) or find_unsendable(self.metrics)

    def unpacked(self) -> Self:
        """The result with its output as values, if it is packed and its bytes are here.

        Raises:
            ModelFailed: the class has sent something else than an output.
        """
        data = self.files[0].data if self.is_packed else None
        if data is None:
            return self
        try:
            output = msgspec.json.decode(data)
            _with_files(output, [place.at for place in self.packed_places], self.packed_places)
        except (msgspec.MsgspecError, LookupError, TypeError, OverflowError) as error:
            raise ModelFailed("output: it is not the JSON that the class announced") from error
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
        """None: a class has no tokens that we know."""
        return None

    @property
    def blobs(self) -> Sequence[Blob]:
        return [*self.files, *self.packed_files]

    def with_blobs(self, blobs: Sequence[Blob]) -> Self:
        """The same output with its files in other places."""
        count = len(self.files)
        files, packed = list(blobs[:count]), list(blobs[count:])
        return msgspec.structs.replace(self, files=files, packed_files=packed)

    def blob_suffix(self, number: int) -> str:
        """Of a streamed file as `streamed_key` has it: it is stored before the others are there."""
        digest = "" if self.is_packed else self.places[number].digest
        return f".{number}-{digest}" if digest else super().blob_suffix(number)

    def to_output(self, media_type: str, link_to: LinkTo) -> Any:
        """The output, with `data:` URIs of small files and URLs of others.

        A packed output whose bytes are elsewhere is a URL.
        """
        if self.is_packed:
            key = self.files[0].object_key
            return (
                self.unpacked().to_output(media_type, link_to)
                if key is None
                else link_to(key, JSON_TYPE)
            )
        if not self.files:
            return self.output
        uris = [_shown(file, link_to) for file in self.files]
        return _with_files(self.output, [place.at for place in self.places], uris)

    def step_value(self) -> Any:
        """The output, with a Blob for each file. A text that was streamed is one text."""
        if self.streams == "text":
            return self.text
        return _with_files(self.output, [place.at for place in self.places], self.files)

    @property
    def text(self) -> str:
        """A streamed output as its stream has it: a text, or a line of JSON for each element."""
        if self.streams == "text":
            return "".join(map(written_piece, self.output))
        files: dict[int, list[StreamedFile]] = {}
        for number, (place, file) in enumerate(zip(self.places, self.files, strict=True)):
            element, *at = place.at
            streamed = streamed_file(at, number, place.digest, file)
            files.setdefault(int(element), []).append(streamed)
        return "".join(
            StreamedElement(value, files.get(number, [])).line
            for number, value in enumerate(self.output)
        )

    @property
    def logprobs(self) -> list[Any]:
        """None: the pieces of an output are no tokens."""
        return []

    @property
    def streamed_tokens(self) -> int:
        return len(self.output)


class CustomInput(TaskInput, tag="custom"):
    """The input of one prediction: plain values, and files in their places."""

    values: dict[str, Any]
    files: list[Blob] = msgspec.field(default_factory=list)
    places: list[FilePlace] = msgspec.field(default_factory=list)
    """Of each file."""
    is_streamed: bool = False
    """True if its pieces go to a stream while they are made."""
    compared_with: CustomResult | None = None
    """What a canary gave for this input, which is computed again to compare the two."""
    context: dict[str, str] = msgspec.field(default_factory=dict)
    """What the class reads as `current_scope().context`."""

    @property
    def sources(self) -> Sequence[Blob]:
        return self.files

    def with_sources(self, sources: Sequence[Blob]) -> Self:
        """The same input with its files in other places."""
        return msgspec.structs.replace(self, files=list(sources))

    def step_value(self) -> dict[str, Any]:
        """The values, with a Blob for each file: the input of a flow, as its steps see it."""
        return dict(_with_files(self.values, [place.at for place in self.places], self.files))

    def estimate_work(self, entry: CatalogEntry) -> int:
        """The most that it may weigh: what it does weigh is known to its worker only."""
        return entry.work.max or 1

    def cache_form(self) -> tuple[object, ...]:
        """All values, and the files by their digests."""
        written = json.dumps(self.values, sort_keys=True)
        files = (
            (json.dumps(place.at), place.name, file.identity)
            for place, file in zip(self.places, self.files, strict=True)
        )
        context = (json.dumps(self.context, sort_keys=True),) if self.context else ()
        return ("custom", written, *files, *context)


def with_places(value: Any) -> tuple[Any, list[Blob], list[FilePlace]]:
    """Returns a value with null for each Blob in it, these, and their places."""
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
            name: _without_files(one, [*at, name], files, places) for name, one in value.items()
        }
    if isinstance(value, list):
        return [
            _without_files(one, [*at, number], files, places) for number, one in enumerate(value)
        ]
    return value


def usual_suffix(file: Blob) -> str:
    """Returns the usual end of the names of such files. Many decide by it what a file is."""
    known = mimetypes.guess_extension(file.media_type, strict=False)
    return known or _OTHER_SUFFIXES.get(file.media_type, "")


def _with_files(value: Any, places: Sequence[list[str | int]], uris: Sequence[Any]) -> Any:
    """Returns a value with URIs in its places. A copy: it may be shown again with others."""
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


def _shown(file: Blob, link_to: LinkTo) -> str:
    return _data_uri(file) or link_to(file.object_key, file.media_type)


def _data_uri(file: Blob) -> str:
    """Returns a file as a URI. Empty: it is in the object store."""
    if file.data is None:
        return ""
    return f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}"


class CustomTask(Task):
    """Custom classes. Their unit of work is what they say that an item weighs, usually 1."""

    name = "custom"
    noun = "a custom model"
    unit = "work"
    precisions = ("auto",)
    first_guesses: ClassVar = FirstGuesses(item_s=1.0, gap_s=0.05, batch_s=0.1)
    stores_blobs = True
    has_interface = True

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """As many items at a time as the class computes. One with `predict_batch` takes any."""
        interface = fields.get("interface")
        if not isinstance(interface, ModelInterface):
            return {"batch": {"max_items": 1}}
        return {"batch": {} if interface.batches else {"max_items": interface.concurrency}}

    def check_entry(self, entry: CatalogEntry) -> None:
        """The class decides how many items it computes at a time."""
        if entry.backend != "auto":
            raise ValueError(f"{self.noun} has no backend; leave it out")
        interface = interface_of(entry)
        _check_work(entry, interface)
        if interface.batches and entry.work.max_s is not None:
            raise ValueError(
                "work.max_s: the class has predict_batch, whose batches end after 5 minutes; "
                "remove it"
            )
        if entry.api is not None:
            _check_api(entry.api, interface, is_flow=entry.flow is not None)
        if interface.batches:
            _check_key(entry.batch.key, interface)
            return
        if entry.batch.key is not None:
            raise ValueError("batch.key: the class has no predict_batch; leave it out")
        if entry.batch.max_items > interface.concurrency:
            raise ValueError(
                f"batch.max_items: the class computes {interface.concurrency} at a time "
                "(concurrency.max of its cog.yaml, or predict_batch)"
            )

    def budget(self, entry: CatalogEntry) -> int:
        return entry.batch.max_work or entry.batch.max_items * (entry.work.max or 1)

    def runs_to_the_end(self, entry: CatalogEntry) -> bool:
        """True of a class without `predict_batch`. A batch ends after five minutes."""
        return not interface_of(entry).batches

    def tolerance(self, entry: CatalogEntry) -> float:
        """None: outputs are equal, or as close as the class says."""
        return 0.0

    def compares(self, tolerance: Tolerance) -> bool:
        """Not here: workers compare (workers/jobs/canary_comparison.py)."""
        return False

    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        """As its penstock.schema.json says. A text that is streamed is one text."""
        interface = interface_of(entry)
        output = {"type": "string"} if interface.streams == "text" else interface.output
        return StepSchema(interface.inputs, output)

    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        """All inputs. The process of the class checks their values."""
        interface = interface_of(entry)
        if unknown := [name for name in values if name not in interface.properties]:
            raise BadInput(f"{unknown[0]}: {entry.name} has no such input", field=unknown[0])
        present = {name: value for name, value in values.items() if value is not None}
        for name in interface.inputs.get("required", ()):
            if name not in present:
                raise BadInput(f"{name}: {entry.name} needs it", field=name)
        plain, files, places = with_places(present)
        if len(files) > MAX_FILES:
            field = str(places[MAX_FILES].at[0])
            raise BadInput(
                f"{field}: at most {MAX_FILES} files are allowed in an item", field=field
            )
        return StepInput(CustomInput(plain, files, places), entry.deterministic)

    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        return WorkBound(entry.work.max or 1)

    def example_request(self, entry: CatalogEntry, text: str) -> ExampleRequest:
        """The inputs that must be given, each with the simplest value."""
        interface = interface_of(entry)
        values = {
            name: _example(interface.properties[name], text)
            for name in interface.inputs.get("required", ())
        }
        body = {"version": entry.name, "input": values}
        return ExampleRequest(path="/v1/predictions", body=body, headers={"prefer": "wait"})

    def describe_answer(self, entry: CatalogEntry, answer: Any) -> str:
        if answer["status"] != "succeeded":
            raise ValueError(f"the prediction {answer['status']}: {answer['error']}")
        return "an output"


def are_equal(ours: CustomResult, theirs: CustomResult) -> bool:
    """Returns whether two outputs are equal, with the bytes of their files."""
    both = (ours.unpacked(), theirs.unpacked())
    first, second = ((one.output, one.files) for one in both)
    return first == second


def interface_of(entry: CatalogEntry) -> ModelInterface:
    """The interface of a custom model.

    Raises:
        ValueError: the entry has none, since no catalog was read.
    """
    if entry.interface is None:
        raise ValueError("the interface of the model is not known (penstock models check)")
    return entry.interface


def streams_of(entry: CatalogEntry) -> str:
    """How the output of a prediction grows, as in the interface. Empty unless it is a class."""
    is_class = entry.interface is not None and entry.flow is None
    return interface_of(entry).streams if is_class else ""


def stores_files(entry: CatalogEntry) -> bool:
    """Returns whether a custom model or a flow may return files, which are stored."""
    return entry.interface is not None and FILE_FORMAT in str(entry.interface.output)


def _check_work(entry: CatalogEntry, interface: ModelInterface) -> None:
    """Checks that the bounds of work are there if the class weighs its items, and only then.

    Raises:
        ValueError: they are not.
    """
    most = entry.work.max
    if interface.weighs and most is None:
        raise ValueError("work.max: the class has work(); say the most that an input may weigh")
    if not interface.weighs and (most is not None or entry.batch.max_work is not None):
        raise ValueError("work.max, batch.max_work: the class has no work(); leave them out")


def _check_api(api: ServedApi, interface: ModelInterface, *, is_flow: bool) -> None:
    """Checks that an endpoint can call a class, or a flow, and read what it gives.

    Raises:
        ValueError: it can't.
    """
    known = API_INPUTS[api]
    first, required = next(iter(known)), interface.inputs.get("required", ())
    if first not in interface.properties:
        raise ValueError(f"api: {api}: the class has no input {first!r}")
    if more := [name for name in required if name != first]:
        raise ValueError(
            f"api: {api}: the input {more[0]!r} needs a default: nothing else gives it"
        )
    for name, kind in known.items():
        shape = interface.properties.get(name)
        if shape is not None and (is_kind := _kind(shape)) != kind:
            raise ValueError(f"api: {api}: the input {name!r} must be a {kind}, not a {is_kind}")
    if is_flow and api == "ocr" and _gives_pages_apart(interface.output):
        return
    element = interface.output.get("items", {})
    streams = "items" if is_flow and _kind(interface.output) == "array" else interface.streams
    if api in _ELEMENTS and (streams, _kind(element)) != ("items", "object"):
        if is_flow and api == "ocr":
            raise ValueError("api: ocr: the flow must give a list of pages, or pages and numbers")
        raise ValueError(
            f"api: {api}: the class must give Iterator[dict[str, Any]], its {_ELEMENTS[api]}"
        )
    said = element if interface.streams else interface.output
    if api == "speech" and (interface.streams == "text" or _kind(said) != "file"):
        raise ValueError(
            f"api: {api}: the class must give a Path, the file with what is said, or Iterator[Path]"
        )


def _gives_pages_apart(output: Mapping[str, Any]) -> bool:
    """True if a flow gives what was read of each page, and beside it the numbers of the pages."""
    fields = output.get("properties", {})
    pages, numbers = (fields.get(name, {}).get("items", {}) for name in ("pages", "numbers"))
    of_a_page = (_kind(pages), _kind(pages.get("items", {})))
    return (*of_a_page, _kind(numbers)) == ("array", "object", "integer")


def _kind(shape: Mapping[str, Any]) -> str:
    """The type that a JSON Schema, as cog writes it, describes in one word."""
    if "anyOf" in shape:
        return _kind(shape["anyOf"][0])
    return "file" if shape.get("format") == FILE_FORMAT else str(shape.get("type", "any value"))


def _check_key(key: str | None, interface: ModelInterface) -> None:
    """Checks that a key of batches is an input whose values can be compared.

    Raises:
        ValueError: it is not.
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
            f"batch.key: {key!r} is no input whose values can be compared; use one of "
            f"{', '.join(plain) or 'none'}"
        )


def _example(shape: Mapping[str, Any], text: str) -> Any:
    """The simplest value of a JSON Schema as cog writes it."""
    if "enum" in shape:
        return shape["enum"][0]
    if "anyOf" in shape:
        return _example(shape["anyOf"][0], text)
    if shape.get("format") == FILE_FORMAT:
        return f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}"
    kind = shape.get("type")
    if kind == "string":
        padded = text.ljust(int(shape.get("minLength", 0)), ".")
        return padded[: int(shape.get("maxLength", len(padded)))]
    if kind in ("integer", "number"):
        return shape.get("minimum", shape.get("maximum", 1))
    plain: dict[str, Any] = {"boolean": False, "array": [], "object": {}}
    return plain.get(str(kind), text)


CUSTOM = CustomTask()
