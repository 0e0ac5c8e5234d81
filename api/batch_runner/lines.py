"""Splits batch JSONL files into requests, and writes outcomes as output lines.

See https://jsonlines.org for the format.
"""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from api.batches.documents import BatchCreated, LineError
from api.batches.endpoint import LineRequest
from api.bodies import check_amount
from api.endpoints import LINE_ENDPOINTS
from api.errors import error_response, to_bad_input
from shared.errors import BadInput, PenstockError, UnknownModel
from shared.models.catalog import Catalog

MAX_LINE_BYTES = 4 * 1024 * 1024
BYTE_ORDER_MARK = codecs.BOM_UTF8
_BESIDE_BYTES = len(BYTE_ORDER_MARK) + 1
"""A byte order mark and a CR, which are not part of the data."""
MAX_CUSTOM_ID_CHARS = 512


class Line(NamedTuple):
    """A line that is not blank."""

    number: int
    """Line number in the file, starting at 1. Blank lines count."""
    offset: int
    """Offset of the line in the file, in bytes."""
    data: bytes | None
    """The line without its line ending. None if the line is too long."""


class LineSplitter:
    """Splits arbitrary pieces of a file into lines. Does no I/O.

    A line ends with LF, CRLF, or the end of the file. Blank lines are skipped. A byte order mark at
    the start of a line, as in concatenated files, is removed. At most one line is held in memory.

    Args:
        longest_bytes: maximum line length; data in longer lines is dropped.
        offset: number of bytes in the file before the first line.
    """

    def __init__(
        self, longest_bytes: int = MAX_LINE_BYTES, *, number: int = 1, offset: int = 0
    ) -> None:
        self._longest_bytes = longest_bytes
        self._number = number
        self._start = offset
        self._held = bytearray()
        self._dropped = 0
        """Number of bytes dropped from the current line because it is too long."""

    def feed(self, data: bytes) -> list[Line]:
        """Takes the next piece. Returns the lines that this piece completes."""
        lines: list[Line] = []
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            self._hold(data[at:end])
            self._end_line(lines, 1)
            at = end + 1
        self._hold(data[at:])
        return lines

    def finish(self) -> list[Line]:
        """Ends the file. Returns the last line if it does not end with a line feed."""
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


class LineRefused(BadInput):
    """A line in the file is invalid."""

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
    """Validates a line the same way as a live request.

    Raises:
        LineRefused: the line is invalid.
    """
    fields = _fields_of(line)
    if not 1 <= len(fields.custom_id) <= MAX_CUSTOM_ID_CHARS:
        reason = f"custom_id must be 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineRefused("invalid_custom_id", reason, line.number, "custom_id")
    if fields.method != "POST":
        raise LineRefused("invalid_method", "method must be POST", line.number, "method")
    if fields.url != batch.endpoint:
        reason = f"url must match the batch's endpoint, {batch.endpoint}"
        raise LineRefused("mismatched_endpoint", reason, line.number, "url")
    body = bytes(fields.body)
    try:
        check_amount(body)
        request = LINE_ENDPOINTS[batch.endpoint].read(
            body, catalog, default_seed(batch, line.number)
        )
        if batch.models is not None and request.model.name not in batch.models:
            raise UnknownModel(
                f"this API key may not use the model {request.model.name}", field="model"
            )
    except (ValidationError, BadInput) as error:
        wrong = error if isinstance(error, BadInput) else to_bad_input(error)
        code = "model_not_found" if isinstance(wrong, UnknownModel) else wrong.code
        param = f"body.{wrong.field}" if wrong.field else "body"
        raise LineRefused(code, wrong.message, line.number, param) from error
    return BatchLine(line.number, fields.custom_id, request)


def custom_id_of(line: Line) -> str:
    """Returns the custom_id of a line that has already been validated."""
    return _fields_of(line).custom_id


def default_seed(batch: BatchCreated, number: int) -> int:
    """Returns a seed for image requests that don't set one.

    The seed is the same each time a line is run.
    """
    digest = hashlib.blake2b(f"{batch.id}-{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def encode_answer(batch: BatchCreated, line: BatchLine, request_id: str, body: bytes) -> bytes:
    """Returns a line for the output file, with an answer."""
    return _encode_response(batch, line, 200, request_id, body)


def encode_failure(
    batch: BatchCreated, line: BatchLine, request_id: str, error: PenstockError
) -> bytes:
    """Returns a line for the error file, with the live route's response."""
    response = error_response(error)
    return _encode_response(batch, line, response.status_code, request_id, bytes(response.body))


def encode_not_run(batch: BatchCreated, number: int, custom_id: str, code: str, why: str) -> bytes:
    """Returns a line for the error file, with the reason a request was not run."""
    return _encode(batch, number, custom_id, error={"code": code, "message": why})


def _encode_response(
    batch: BatchCreated, line: BatchLine, status: int, request_id: str, body: bytes
) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encode(batch, line.number, line.custom_id, response)


def _encode(
    batch: BatchCreated,
    number: int,
    custom_id: str,
    response: dict[str, Any] | None = None,
    error: dict[str, str] | None = None,
) -> bytes:
    line_id = f"batch_req_{batch.id.removeprefix('batch_')}_{number}"
    line = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line)


def _fields_of(line: Line) -> _Fields:
    if line.data is None:
        reason = f"the line exceeds the maximum of {MAX_LINE_BYTES} bytes"
        raise LineRefused("line_too_long", reason, line.number)
    try:
        return _decoder.decode(line.data)
    except msgspec.ValidationError as error:
        raise LineRefused("invalid_request", str(error), line.number) from error
    # Raises UnicodeDecodeError if the bytes are not UTF-8.
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = f"the line is not valid JSON: {error}"
        raise LineRefused("invalid_json_line", reason, line.number) from error
