"""The messages that a worker sends to a class's runner, and the parsing of its responses."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from shared.errors import BadInput, Canceled, ModelFailed, PenstockError
from shared.models.blob import Blob
from shared.models.interface import ModelInterface
from shared.models.tasks.custom import (
    JSON_TYPE,
    CustomResult,
    FilePlace,
    PieceChunk,
    StreamedElement,
    StreamedFile,
    file_digest,
    make_streamed_file,
)
from workers.models.base import PreparedCustom
from workers.models.custom.public_text import PathRemover, PublicLogs
from workers.models.custom.runner.frames import MAX_BLOBS_BYTES, MAX_OUTPUT_BYTES, Frame
from workers.models.reports import FileOfPiece

MALFORMED = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    msgspec.MsgspecError,
)
"""Errors raised when reading an invalid response. A class may write to its own socket."""
NO_ANSWER = "it sent an invalid response"
MAX_PIECES = 1_000_000
"""Maximum number of pieces in one prediction.

The runner allows fewer, because their total size is limited to 1 MiB of JSON.
"""
_FIRST_WORD = re.compile(r"\w+")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,100}/[\w.+-]{1,100}")


class WrongAnswer(ValueError):
    """A response that doesn't match any request."""


class Prediction:
    """An item being computed: its input, and pieces that have not been reported yet.

    A restarted runner yields the first pieces again. If the text has changed, no more pieces are
    reported, because readers could not continue from it.

    Args:
        is_text: True if its pieces are parts of one text.
    """

    def __init__(self, slot: int, number: int, item: PreparedCustom, *, is_text: bool) -> None:
        self.slot = slot
        self.number = number
        self.item = item
        self.is_sent = False
        self.is_suspect = False
        """True if the item was in a runner that died while running several items at once. From then
        on, the item runs by itself.
        """
        self.logs = PublicLogs(PathRemover(None, ()))
        """The prediction's printed output."""
        self._received = self._received_bytes = 0
        """Number of pieces from the current runner, and the total number of bytes in their files.
        """
        self._is_text = is_text
        self._count = self._reported = item.written_pieces
        self._text = io.StringIO(item.written_text)
        """The text of all pieces, whether or not they have been reported. Position up to which the
        current runner has yielded the text.
        """
        self._texts: list[str] = []
        """Text of the pieces that have not been reported."""
        self._differs = False
        self._filed = 0
        """Number of pieces whose files are in `files`."""
        self.files: list[tuple[FilePlace, Blob]] = []
        """Files of all pieces so far."""
        self._new_files: list[FileOfPiece] = []
        """Files of unreported pieces that are too large to be included in the pieces."""

    def start_over(self) -> None:
        """Records that the runner has died and that a new one will compute this item."""
        self.is_sent, self._received, self._received_bytes = False, 0, 0
        self._text.seek(0)

    def add_piece(self, frame: Frame) -> None:
        """Adds the next piece from the runner, with its files.

        Raises:
            ValueError: the piece is not valid; see MALFORMED for other errors.
        """
        number, self._received = self._received, self._received + 1
        self._received_bytes += sum(map(len, frame.blobs))
        if self._received > MAX_PIECES or self._received_bytes > MAX_BLOBS_BYTES:
            raise WrongAnswer("its stream exceeds the maximum size")
        if number >= self._filed:
            self._filed = self._received
            for where, data in zip(frame.message["files"], frame.blobs, strict=True):
                _check_place(frame.message["piece"], where | {"at": where["at"][1:]})
                place = FilePlace([number, *where["at"][1:]], where["name"], file_digest(data))
                self.files.append((place, Blob(where["media_type"], data=data)))
        if self._differs or not self.item.is_streamed:
            return
        piece = frame.message["piece"]
        text, large = piece, list[FileOfPiece]()
        if not self._is_text:
            text, large = self._line(piece, number)
        if number < self._count:
            is_last = number == self._count - 1
            self._differs = self._text.read(-1 if is_last else len(text)) != text
            return
        self._count += 1
        self._text.write(text)
        self._texts.append(text)
        self._new_files += large

    def _line(self, piece: Any, number: int) -> tuple[str, list[FileOfPiece]]:
        """Returns an element as a line, along with the files that are too large for the line."""
        files: list[StreamedFile] = []
        large: list[FileOfPiece] = []
        for at, (place, blob) in enumerate(self.files):
            if place.at[0] != number:
                continue
            file = make_streamed_file(place.at[1:], at, place.digest, blob)
            files.append(file)
            if not file.uri:
                large.append(FileOfPiece(file, blob.data or b""))
        return StreamedElement(piece, files).line, large

    def take_chunk(self) -> PieceChunk | None:
        """Returns the pieces since the last call, or None if there are none."""
        first, texts = self._reported, self._texts
        if not texts:
            return None
        self._reported, self._texts = self._count, []
        return PieceChunk(first, "".join(texts), [len(text) for text in texts])

    def take_files(self) -> list[FileOfPiece]:
        """Returns the large files of the pieces that were just taken."""
        files, self._new_files = self._new_files, []
        return files


def outcome_of(
    frame: Frame,
    interface: ModelInterface,
    work: int,
    paths: PathRemover,
    streamed: Sequence[tuple[FilePlace, Blob]] = (),
) -> CustomResult | PenstockError:
    """Returns the outcome from a prediction's last frame.

    Args:
        paths: removes our paths from error messages.
        streamed: the files of the prediction's pieces.

    Raises:
        ValueError: the frame is not a valid response; see MALFORMED for other errors.
    """
    message = frame.message
    if "error" not in message:
        if not isinstance(message["metrics"], dict):
            raise ValueError("metrics that are not an object")
        if message.get("is_packed"):
            return _pack_result(frame, work)
        places, files = [place for place, _ in streamed], [file for _, file in streamed]
        for where, data in zip(message["files"], frame.blobs, strict=True):
            _check_place(message["output"], where)
            files.append(Blob(where["media_type"], data=data))
            places.append(FilePlace(where["at"], where["name"]))
        return CustomResult(
            message["output"], files, places, interface.streams, message["metrics"], work
        )
    reason = paths.remove(str(message["error"]))
    if message["kind"] == "input":
        named = _FIRST_WORD.match(reason)
        is_known = named is not None and named[0] in interface.properties
        return BadInput(reason, field=named[0] if named and is_known else None)
    return Canceled() if message["kind"] == "canceled" else ModelFailed(reason)


def _pack_result(frame: Frame, work: int) -> CustomResult:
    """Packs a large output.

    Its JSON is validated but not parsed, because parsing 16 MiB may take a second.
    """
    written, *blobs = frame.blobs
    if len(written) > MAX_OUTPUT_BYTES:
        raise ValueError(f"invalid output length: {len(written)} bytes")
    msgspec.json.decode(written, type=msgspec.Raw)
    packed_files, packed_places = [], []
    for where, data in zip(frame.message["files"], blobs, strict=True):
        _check_file(where)
        packed_files.append(Blob(where["media_type"], data=data))
        packed_places.append(FilePlace(where["at"], where["name"]))
    return CustomResult(
        None,
        [Blob(JSON_TYPE, data=written)],
        [FilePlace([], "output.json")],
        metrics=frame.message["metrics"],
        work=work,
        is_packed=True,
        packed_files=packed_files,
        packed_places=packed_places,
    )


def message_of(number: int, item: PreparedCustom) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the message that makes the runner compute an item, and the bytes of its files."""
    files = [{"at": file.at, "name": file.name, "is_json": file.is_json} for file in item.files]
    message = {"id": number, "input": item.values, "files": files, "context": item.context}
    return message, [file.data for file in item.files]


def _check_place(output: Any, where: dict[str, Any]) -> None:
    """Raises an error if a file has no place in an output. A class may write to its socket."""
    _check_file(where)
    place = output
    for part in where["at"]:
        place = place[part]
    if place is not None:
        raise ValueError("a file where another value was expected")


def _check_file(where: dict[str, Any]) -> None:
    is_place = isinstance(where["at"], list) and all(
        isinstance(part, str | int) for part in where["at"]
    )
    is_named = isinstance(where["name"], str) and _MEDIA_TYPE.fullmatch(where["media_type"])
    if not (is_place and is_named):
        raise ValueError("a file without a place, media type or name")
