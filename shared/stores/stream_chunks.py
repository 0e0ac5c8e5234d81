"""Merges, encodes, and decodes stream chunks."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from shared.models.tasks.custom import PieceChunk
from shared.models.tasks.text import TokenChunk

Chunk = TokenChunk | PieceChunk


class _StoredPieces(PieceChunk, omit_defaults=True):
    """Stored pieces. Release 0.1.0 reads them as tokens, and stored its pieces without lengths."""

    ids: list[int] = msgspec.field(default_factory=list)
    """Checksums."""


_encoder = msgspec.msgpack.Encoder()
_token_decoder = msgspec.msgpack.Decoder(TokenChunk)
_piece_decoder = msgspec.msgpack.Decoder(PieceChunk)


def encode_chunk(chunk: Chunk) -> bytes:
    """Encodes a chunk as MessagePack, readable by release 0.1.0."""
    if isinstance(chunk, PieceChunk):
        chunk = _StoredPieces(chunk.first, chunk.text, chunk.lengths, _as_tokens(chunk).ids)
    return _encoder.encode(chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Decodes a chunk from MessagePack.

    Raises:
        MALFORMED (shared/errors.py): the data is not a chunk.
    """
    # Only pieces have lengths, but the text itself may contain that word.
    if b"lengths" in data and (pieces := _piece_decoder.decode(data)).lengths:
        return pieces
    return _token_decoder.decode(data)


def merge_chunks(written: Sequence[Chunk], first: int) -> Chunk | None:
    """Returns one chunk containing all units from `first` on.

    None if there are none, or if `first` lies within a chunk of tokens. Release 0.1.0
    stored pieces as tokens, and pieces that follow such chunks become tokens too.
    """
    starts_last = bool(written) and written[-1].first == first  # true for nearly every token
    if starts_last and (len(written) == 1 or written[-2].first < first):
        return written[-1]
    at = bisect_left(written, first, key=lambda chunk: chunk.first)
    parts = list(written[at:])
    if at and isinstance(before := written[at - 1], PieceChunk) and before.end > first:
        parts.insert(0, before.since(first))
    if not parts or parts[0].first != first:
        return None
    if len(parts) == 1:
        return parts[0]
    text = "".join(part.text for part in parts)
    pieces = [part for part in parts if isinstance(part, PieceChunk)]
    if len(pieces) == len(parts):
        return PieceChunk(first, text, [length for part in pieces for length in part.lengths])
    tokens = [part if isinstance(part, TokenChunk) else _as_tokens(part) for part in parts]
    return TokenChunk(
        first,
        [token for part in tokens for token in part.ids],
        text,
        [logprob for part in tokens for logprob in part.logprobs],
        tokens[0].input_tokens,
        tokens[0].cached_tokens,
    )


def _as_tokens(chunk: PieceChunk) -> TokenChunk:
    """Returns pieces in release 0.1.0's form: tokens whose IDs are checksums."""
    return TokenChunk(
        chunk.first, [zlib.crc32(piece.encode()) for piece in chunk.pieces], chunk.text
    )
