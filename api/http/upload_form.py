"""Parses multipart forms, either incrementally or completely.

`UploadForm` yields the file in pieces and stores the other fields as text. `open_form` reads the
whole form and closes its files, even if the form is truncated.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Message, Receive

from api.inputs.files import is_charset
from shared.errors import BadInput

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# Possessive quantifiers and an optional end make the expression read each byte only once.
_QUOTED = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_EXTENDED_NAME = re.compile(rb"""; *filename\* *= *(?:([\w.-]*)'[^']*')?([^;]*)""", re.I)
_ENCODED_WORD = re.compile(rb"=\?([\w.-]+)\?[BQbq]\?[^?]*\?=")

MAX_EDIT_FIELDS = 64

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
_PEEK_BYTES = 4096
_DISPOSITION = b"content-disposition:"

_TRUE = ("true", "1", "on", "t", "y", "yes")
"""Values that pydantic parses as true."""


def plain_disposition(header: bytes) -> bytes:
    """Returns a Content-Disposition header with the file name as plain UTF-8 in `filename`.

    Clients send non-ASCII names either in `filename*` (RFC 8187), sometimes along with a `filename`
    for old servers, or as an encoded word (RFC 2047).
    """
    extended = _EXTENDED_NAME.search(_QUOTED.sub(b'""', header))
    _, options = parse_options_header(header)
    filename = options.get(b"filename", b"")
    if extended is not None:
        name = _decode_name(unquote_to_bytes(extended[2].strip()), extended[1] or b"")
    elif (word := _ENCODED_WORD.fullmatch(filename)) and is_charset(word[1].decode()):
        try:
            name = str(make_header(decode_header(filename.decode("ascii", "replace"))))
        except (HeaderParseError, LookupError, ValueError):
            return header
    else:
        return header
    field = options.get(b"name", b"")
    return b'form-data; name="%s"; filename="%s"' % (
        _escape(field),
        _escape(name.encode(errors="replace")),  # decoding may produce a lone surrogate
    )


def _decode_name(name: bytes, charset: bytes) -> str:
    try:
        return name.decode(named if is_charset(named := charset.decode()) else "utf-8", "replace")
    except (LookupError, UnicodeError):
        return name.decode("utf-8", "replace")


def _escape(text: bytes) -> bytes:
    return text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


class _FormParser(MultiPartParser):
    """Starlette's parser, extended to support other file name encodings."""

    def on_headers_finished(self) -> None:
        part = self._current_part
        part.content_disposition = plain_disposition(part.content_disposition or b"")
        super().on_headers_finished()


def check_charset(content_type: str) -> None:
    """Accepts only UTF-8 forms, which all clients send, because some of Python's codecs can fail.

    Args:
        content_type: value of the request header.

    Raises:
        BadInput: the form uses a different charset.
    """
    _, parameters = parse_options_header(content_type)
    charset = parameters.get(b"charset", b"utf-8").lower()
    if charset not in (b"utf-8", b"utf8"):
        charset_name = charset[:40].decode("latin-1")
        raise BadInput(
            f"content-type: forms must use UTF-8, got {charset_name!r}", field="content-type"
        )


@asynccontextmanager
async def open_form(request: Request, **limits: int) -> AsyncIterator[FormData]:
    """Opens a multipart/form-data form, like `Request.form`, and closes it afterward.

    `Request.form` leaves a file open if the body is cut off in the middle of it. Without a
    multipart/form-data body, the form is empty.

    Args:
        request: request whose body has not yet been read.
        limits: Starlette's MultiPartParser limits: `max_files`, `max_fields`, `max_part_size`.

    Raises:
        BadInput: the form is not in UTF-8.
        HTTPException: 400 if the body is not a multipart form.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        yield FormData()
        return
    check_charset(content_type)
    async with aclosing(request.stream()) as stream:
        parser = _FormParser(request.headers, stream, **limits)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise HTTPException(400, error.message) from error
        try:
            yield form
        finally:
            for file in parser._files_to_close_on_error:
                file.close()


class UploadForm:
    """A multipart form with a file in the field `file_field`.

    Args:
        content_type: value of the request header.
        file_field: name of the field with the file.

    Raises:
        BadInput: the content type is not multipart/form-data.
    """

    def __init__(self, content_type: str, file_field: str) -> None:
        self.fields: dict[str, str] = {}
        """Other fields by name."""
        self.filename: str | None = None
        """File name. None until the file's part begins."""
        self._file_field = file_field
        self._header, self._disposition = (b"", b""), b""
        self._name: str | None = None
        self._value = bytearray()
        self._pieces: list[bytes] = []
        self._is_complete = False
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise BadInput("content-type: must be multipart/form-data", field="content-type")
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise BadInput(f"the form can't be read: {error}") from error

    def feed(self, data: bytes) -> list[bytes]:
        """Parses a piece of the body. Returns the pieces of the file that it contains.

        Raises:
            BadInput: the form can't be read or has too many fields.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadInput(f"the form can't be read: {error}") from error
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """Checks that the form is complete.

        Raises:
            BadInput: the form is truncated, or the file is missing.
        """
        if not self._is_complete:
            raise BadInput("the form ends before its final boundary")
        if self.filename is None:
            raise BadInput(f"{self._file_field}: a file is required", field=self._file_field)

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._add_header(data[start:end], b""),
            "on_header_value": lambda data, start, end: self._add_header(b"", data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._header, self._disposition, self._value = (b"", b""), b"", bytearray()

    def _add_header(self, name: bytes, value: bytes) -> None:
        self._header = (self._header[0] + name, self._header[1] + value)

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = (b"", b"")

    def _end_headers(self) -> None:
        _, options = parse_options_header(plain_disposition(self._disposition))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == self._file_field:
            if self.filename is not None:
                raise BadInput(f"{name}: exactly one file is required", field=name)
            if b"filename" not in options:
                raise BadInput(f"{name}: must be a file, not text", field=name)
            self.filename = options[b"filename"].decode("utf-8", "replace")
            self._name = None
            return
        if b"filename" in options:
            raise BadInput(f"{name[:80]}: must not be a file", field=name[:80])
        if not name or name in self.fields or len(self.fields) >= MAX_FIELDS:
            raise BadInput(
                f"{name[:80] or 'a field'}: has no name, is repeated, or exceeds the maximum "
                "number of fields"
            )
        self._name = name

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise BadInput(f"{self._name[:80]}: must be at most {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


async def first_field(request: Request) -> tuple[str, Request]:
    """Returns a form's first field name, and a request that can be read again."""
    read: list[Message] = []
    name, is_all = None, False
    while name is None and not is_all:
        message = await request.receive()
        read.append(message)
        head = b"".join(message.get("body", b"") for message in read)
        is_all = not message.get("more_body") or len(head) > _PEEK_BYTES
        name = _first_name(head[:_PEEK_BYTES], is_all=is_all)
    replayed = Request(request.scope, _create_replay(read, request.receive))
    return (name or b"").decode("utf-8", "replace"), replayed


def _first_name(head: bytes, *, is_all: bool) -> bytes | None:
    """Returns the name in the first Content-Disposition. None if that line has not arrived yet."""
    at = head.lower().find(_DISPOSITION)
    line, end, _ = head[at + len(_DISPOSITION) :].partition(b"\r")
    if at < 0 or not (end or is_all):
        return None
    _, options = parse_options_header(line)
    return options.get(b"name", b"")


def _create_replay(read: list[Message], receive: Receive) -> Receive:
    messages = _messages(read, receive)

    async def replay() -> Message:
        return await anext(messages)

    return replay


async def _messages(read: list[Message], receive: Receive) -> AsyncIterator[Message]:
    while read:
        yield read.pop(0)
    while True:
        yield await receive()


async def form_asks_for_stream(request: Request, **limits: int) -> bool:
    """Returns whether a form sets `stream` to true. The form can still be read afterward."""
    await request.body()  # both readers then use the buffered body
    async with open_form(request, **limits) as form:
        stream = form.get("stream", "")
        return isinstance(stream, str) and stream.lower() in _TRUE
