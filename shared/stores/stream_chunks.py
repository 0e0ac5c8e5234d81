"""The chunks of a stream: merging and decoding them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from shared.models.tasks.custom import PieceChunk
from shared.models.tasks.text import TokenChunk

Chunk = TokenChunk | PieceChunk


class _StoredChunk(TokenChunk, omit_defaults=True):
    """A chunk of either kind. Release 0.1.0 stored pieces as tokens, without their lengths."""

    lengths: list[int] = msgspec.field(default_factory=list)


_decoder = msgspec.msgpack.Decoder(_StoredChunk)


def decode_chunk(data: bytes) -> Chunk:
    """Decodes a chunk from MessagePack.

    Raises:
        msgspec.MsgspecError: the data is not a chunk.
    """
    stored = _decoder.decode(data)
    if stored.lengths:
        return PieceChunk(stored.first, stored.ids, stored.text, stored.lengths)
    return TokenChunk(
        stored.first,
        stored.ids,
        stored.text,
        stored.logprobs,
        stored.input_tokens,
        stored.cached_tokens,
    )


def merge_chunks(written: Sequence[Chunk], first: int) -> Chunk | None:
    """Returns one chunk with all units from `first`.

    None: there are none, or `first` is in the middle of a chunk without lengths. Pieces that follow
    pieces stored by release 0.1.0 become tokens like them.
    """
    parts = written[bisect_left(written, first, key=lambda chunk: chunk.first) :]
    if not parts or parts[0].first != first:
        return None
    if len(parts) == 1:
        return parts[0]
    ids = [one for part in parts for one in part.ids]
    text = "".join(part.text for part in parts)
    pieces = [part for part in parts if isinstance(part, PieceChunk)]
    if len(pieces) == len(parts):
        return PieceChunk(first, ids, text, [one for part in pieces for one in part.lengths])
    tokens = [part for part in parts if isinstance(part, TokenChunk)]
    return TokenChunk(
        first,
        ids,
        text,
        [one for part in tokens for one in part.logprobs],
        tokens[0].input_tokens,
        tokens[0].cached_tokens,
    )
