"""Lines of batches: splits a JSONL file into requests, and writes outcomes as lines of the output.

The format is that of https://jsonlines.org.

A line may also be a prediction of a model of one's own, or a run of a flow. Its body is that of
POST /v1/predictions, and the answer is a prediction that succeeded, without what belongs to a
record. Links would end before a batch is read, so the files of an output are in it as `data:` URIs.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
from pydantic import Field, ValidationError

from api.batches.documents import BatchCreated, LineError
from api.bodies import Body, check_amount
from api.errors import error_response, to_bad_input
from api.mistral.ocr import OcrEndpoint
from api.openai.audio import TranscriptionsEndpoint, TranslationsEndpoint
from api.openai.embeddings import EmbeddingsEndpoint
from api.openai.endpoint import Endpoint, LineCaller, LineRequest, ReplyTools
from api.openai.generation import ChatEndpoint, CompletionEndpoint
from api.openai.images import GenerationsEndpoint
from api.openai.rerank import RerankEndpoint
from api.predictions.creation import OWNER, find_version, version_of
from api.tasks.custom import add_files, checked_input
from shared.blob import FILE_FORMAT, Blob
from shared.catalog import Catalog
from shared.charge import cost_usd
from shared.errors import BadInput, ModelFailed, PenstockError, Unavailable, UnknownModel
from shared.messages import ItemOutcome
from shared.tasks.custom import CustomInput, CustomResult, interface_of

MAX_OUTPUT_FILES_BYTES = 4 * 1024 * 1024
"""Of the files of one answer. A segment of lines is held in memory."""
_REPLY_BYTES, _REPLY_WITH_FILES_BYTES = 64 * 1024, 1024 * 1024
_ACCEPTED = ("data:", "https://", "http://", "file-")


class PredictionLine(Body):
    """The body of a line."""

    version: str = Field(min_length=1, max_length=512)
    input: dict[str, Any]


class PredictionsEndpoint(Endpoint):
    """Lines whose body is that of POST /v1/predictions, for models of one's own and flows."""

    path = "/v1/predictions"

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item. Its files are loaded when it runs."""
        body = PredictionLine.model_validate_json(data, strict=True)
        model = find_version(catalog, body.version)
        if not model.definition.has_interface:
            raise BadInput(
                f"version: {model.name} has an endpoint of its own; predictions in batches are for "
                "models of the task custom and for flows",
                field="version",
            )
        try:
            custom_input, files = checked_input(body.input, model)
        except (ValidationError, BadInput) as error:
            raise _in_input(error) from error
        for at, url in files:
            if not url.startswith(_ACCEPTED):
                raise BadInput(
                    f"input.{at[0]}: expected a data: URI, an https URL, or the id or URL of a "
                    "file of this API",
                    field=f"input.{at[0]}",
                )
        has_files = FILE_FORMAT in str(interface_of(model).output)
        reply_bytes = _REPLY_WITH_FILES_BYTES if has_files else _REPLY_BYTES
        custom_input.is_streamed = False
        return LineRequest(body, model, [custom_input], bool(model.cache.ttl_s), reply_bytes)

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[CustomInput]:
        """Loads the files of the line. Each try does, but an unchanged file is not loaded again."""
        body = cast(PredictionLine, request.body)
        custom_input, files = checked_input(body.input, request.model)
        custom_input.is_streamed = False
        owner = caller.file_owner("input")
        try:
            await add_files(custom_input, files, owner, caller.source_images)
        except BadInput as error:
            raise _in_input(error) from error
        return [custom_input]

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the prediction, with its files as `data:` URIs."""
        (outcome,) = outcomes
        result = outcome.result
        assert isinstance(result, CustomResult), "a class gave something else; this is a bug"
        files: list[Blob] = []
        for blob in result.files:
            left_bytes = MAX_OUTPUT_FILES_BYTES - sum(len(one.data or b"") for one in files)
            files.append(await _loaded(blob, left_bytes, tools))
        took_ms = outcome.receipt.inference_ms
        times = {} if took_ms is None else {"predict_time": round(took_ms / 1000, 6)}
        own = {**times, "cost_usd": cost_usd(tools.price, outcome)}
        shown = {
            "model": f"{OWNER}/{request.model.name}",
            "version": version_of(request.model),
            "status": "succeeded",
            "output": result.with_blobs(files).to_output("", lambda key, media_type="": ""),
            "logs": "" if outcome.logs is None else outcome.logs.after(0),
            "error": None,
            "metrics": {**result.recorded_metrics, **(tools.run_metrics or own)},
        }
        return msgspec.json.encode(shown)


async def _loaded(blob: Blob, left_bytes: int, tools: ReplyTools) -> Blob:
    data = blob.data
    try:
        if blob.object_key is not None:
            data = await tools.objects.get(blob.object_key, left_bytes)
    except BadInput as error:
        if error.code == BadInput.code:
            raise Unavailable("a file of the output is gone", public="try again") from error
        data = None
    if data is None or len(data) > left_bytes:
        raise ModelFailed(
            f"output: its files together have more than the {MAX_OUTPUT_FILES_BYTES} bytes that an "
            "answer in a batch may have; create a prediction, whose files are links"
        )
    return Blob(blob.media_type, data=data)


def _in_input(error: ValidationError | BadInput) -> BadInput:
    """The same error, about a field of `input`."""
    wrong = to_bad_input(error) if isinstance(error, ValidationError) else error
    if wrong.field in (None, "input"):
        return wrong
    return type(wrong)(f"input.{wrong.message}", field=f"input.{wrong.field}")


ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        EmbeddingsEndpoint(),
        RerankEndpoint(),
        GenerationsEndpoint(),
        ChatEndpoint(),
        CompletionEndpoint(),
        TranscriptionsEndpoint(),
        TranslationsEndpoint(),
        PredictionsEndpoint(),
        OcrEndpoint(),
    )
}
"""By path: those that lines of a batch may name."""

MAX_LINE_BYTES = 4 * 1024 * 1024
BYTE_ORDER_MARK = codecs.BOM_UTF8
_BESIDE_BYTES = len(BYTE_ORDER_MARK) + 1
"""A mark and a CR, which are not part of the data."""


class Line(NamedTuple):
    """A line that is not blank."""

    number: int
    """Its number in the file, from 1. Blank lines count."""
    offset: int
    """Offset of the line in the file, in bytes."""
    data: bytes | None
    """Without its end. None: it is too long."""


class LineSplitter:
    """Splits pieces of a file, cut anywhere, into lines. Pure: no I/O.

    A line ends with LF or CRLF, the last one also with the file. Blank lines are left out, as is a
    byte order mark at the start of a line, which joined files have. No more than one line is held.

    Args:
        longest_bytes: the data of longer lines is dropped.
        number: of the first line.
        offset: bytes before the first line in the file.
    """

    def __init__(
        self, longest_bytes: int = MAX_LINE_BYTES, *, number: int = 1, offset: int = 0
    ) -> None:
        self._longest_bytes = longest_bytes
        self._number = number
        self._start = offset
        self._held = bytearray()
        self._dropped = 0
        """Bytes of the current line that were dropped, as it is too long."""

    def feed(self, data: bytes) -> list[Line]:
        """Takes the next piece. Returns the lines that it completes."""
        lines: list[Line] = []
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            self._hold(data[at:end])
            self._end_line(lines, 1)
            at = end + 1
        self._hold(data[at:])
        return lines

    def finish(self) -> list[Line]:
        """Ends the file. Returns its last line, if it did not end with a line feed."""
        lines: list[Line] = []
        self._end_line(lines, 0)
        return lines

    def _hold(self, data: bytes) -> None:
        if self._dropped or len(self._held) + len(data) > self._longest_bytes + _BESIDE_BYTES:
            self._dropped += len(self._held) + len(data)
            self._held.clear()
        else:
            self._held += data

    def _end_line(self, lines: list[Line], end_bytes: int) -> None:
        size_bytes = self._dropped + len(self._held)
        data: bytes | None = None if self._dropped else bytes(self._held).removesuffix(b"\r")
        if data is not None:
            data = data.removeprefix(BYTE_ORDER_MARK)
        if data is not None and len(data) > self._longest_bytes:
            data = None
        if data is None or data.strip(b" \t\r"):
            lines.append(Line(self._number, self._start, data))
        self._number += 1
        self._start += size_bytes + end_bytes
        self._held.clear()
        self._dropped = 0


MAX_CUSTOM_ID_CHARS = 512


class LineRefused(BadInput):
    """A line of the file is wrong."""

    def __init__(self, code: str, message: str, line: int, param: str | None = None) -> None:
        super().__init__(message, field=param)
        self.shown = LineError(code, self.message, line, param)


class _Fields(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A validated line."""

    number: int
    custom_id: str
    request: LineRequest


def read_line(line: Line, batch: BatchCreated, catalog: Catalog) -> BatchLine:
    """Validates a line as the live route does.

    Raises:
        LineRefused: something in it is wrong.
    """
    fields = _fields_of(line)
    if not 1 <= len(fields.custom_id) <= MAX_CUSTOM_ID_CHARS:
        reason = f"custom_id has 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineRefused("invalid_custom_id", reason, line.number, "custom_id")
    if fields.method != "POST":
        raise LineRefused("invalid_method", "method must be POST", line.number, "method")
    if fields.url != batch.endpoint:
        reason = f"url must be the endpoint of the batch, {batch.endpoint}"
        raise LineRefused("mismatched_endpoint", reason, line.number, "url")
    body = bytes(fields.body)
    try:
        check_amount(body)
        request = ENDPOINTS[batch.endpoint].read(body, catalog, default_seed(batch, line.number))
        if batch.models is not None and request.model.name not in batch.models:
            raise UnknownModel(f"the key may not use {request.model.name}", field="model")
    except (ValidationError, BadInput) as error:
        wrong = error if isinstance(error, BadInput) else to_bad_input(error)
        code = "model_not_found" if isinstance(wrong, UnknownModel) else wrong.code
        param = f"body.{wrong.field}" if wrong.field else "body"
        raise LineRefused(code, wrong.message, line.number, param) from error
    return BatchLine(line.number, fields.custom_id, request)


def custom_id_of(line: Line) -> str:
    """Returns the custom_id of a line that was validated before."""
    return _fields_of(line).custom_id


def default_seed(batch: BatchCreated, number: int) -> int:
    """Returns the seed of images without one: the same each time a line is computed."""
    digest = hashlib.blake2b(f"{batch.id}-{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def answered(batch: BatchCreated, line: BatchLine, request_id: str, body: bytes) -> bytes:
    """Returns the line of the output file with an answer."""
    return _line(batch, line.number, line.custom_id, 200, request_id, body)


def refused(batch: BatchCreated, line: BatchLine, request_id: str, error: PenstockError) -> bytes:
    """Returns the line of the error file with the response that the live route gives."""
    response = error_response(error)
    body = bytes(response.body)
    return _line(batch, line.number, line.custom_id, response.status_code, request_id, body)


def not_run(batch: BatchCreated, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Returns the line of the error file of a request that was not run, and why."""
    wrong = {"code": code, "message": message}
    return msgspec.json.encode(
        {
            "id": _id(batch, number),
            "custom_id": custom_id,
            "response": None,
            "error": wrong,
        }
    )


def _line(
    batch: BatchCreated, number: int, custom_id: str, status: int, request_id: str, body: bytes
) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return msgspec.json.encode(
        {
            "id": _id(batch, number),
            "custom_id": custom_id,
            "response": response,
            "error": None,
        }
    )


def _id(batch: BatchCreated, number: int) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{number}"


def _fields_of(line: Line) -> _Fields:
    if line.data is None:
        reason = f"the line is longer than {MAX_LINE_BYTES} bytes"
        raise LineRefused("line_too_long", reason, line.number)
    try:
        return _decoder.decode(line.data)
    except msgspec.ValidationError as error:
        raise LineRefused("invalid_request", str(error), line.number) from error
    # Bytes that are not UTF-8 raise a UnicodeDecodeError.
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = f"the line is not valid JSON: {error}"
        raise LineRefused("invalid_json_line", reason, line.number) from error
