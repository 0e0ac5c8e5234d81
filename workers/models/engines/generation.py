"""One text that an engine writes.

Its prompt is read in parts, so that no other text waits for more than one of them, and so that a
caller who has gone costs no more than that. It is then written as a stream.

Some texts are written in pieces instead, with a separate request for each: texts with log
probabilities, because a stream leaves out the tokens that end within a character; texts with
penalties, because llama.cpp's penalties count the prompt; and texts whose JSON continues after
earlier output, because a grammar starts at its beginning. In these texts, each token is chosen
among the tokens that the schema allows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import aiohttp
import numpy as np

from shared.errors import ModelFailed
from shared.models.tasks import Result
from shared.models.tasks.text import TokenChunk
from workers.models.base import PreparedPrompt
from workers.models.engines.llama_cpp import PATH, Asked, Chosen, Reply, decode_reply, request_of
from workers.models.engines.process import EngineProcess
from workers.models.engines.slots import EngineSlots, ReadingPermit, ReadingPermits
from workers.models.generation.vocabulary import Vocabulary
from workers.models.generation.writing import IDS, NO_NUMBERS, Writing

PIECE_TOKENS = 8
"""Tokens to write per request if the engine chooses among all tokens."""
_ALLOWED_BIAS = 1000.0
"""Added to the logits of all tokens that are allowed, if they are few. So no other is chosen, and
their chances among each other stay (to 1e-4)."""
_EXCLUDED_BIAS = -1e9
_FORCING = 1e4
_LOOKED_UP = 256
"""Nearly every chosen token is among this many of the likeliest ones."""

OnWork = Callable[[int, int], None]
"""Called as on_work(slot, tokens) when tokens of an item were read or written."""


class EngineGeneration:
    """An admitted item."""

    def __init__(self, slot: int, item: PreparedPrompt, vocabulary: Vocabulary) -> None:
        self.slot = slot
        self.item = item
        self.writing = Writing(item, vocabulary)
        self.prompt_tokens = len(item.ids) // IDS.itemsize
        self._vocabulary = vocabulary
        self._prompt = np.frombuffer(item.ids, IDS).tolist()
        self._cached_tokens = item.written_cached_tokens if item.written_ids else None
        self._asked_at = 0
        """Tokens that were written before the current request."""
        self._has_lost = False
        """True if a stream has left out tokens that can't be reconstructed, or violated the schema.
        """

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were computed before."""
        return min(self._cached_tokens or 0, self.prompt_tokens)

    @property
    def ids(self) -> list[int]:
        """All of its tokens."""
        return [*self._prompt, *self.writing.ids]

    def share_prompt(self) -> None:
        """Counts its prompt as cached, because another text of its owner continues from it.

        Another slot reads it again, which costs nobody.
        """
        if self._cached_tokens is None:
            self._cached_tokens = self.prompt_tokens - 1

    def chunk(self) -> TokenChunk | None:
        """Returns the text written since the last call. None if there is none."""
        chunk = self.writing.take_chunk()
        if chunk is not None and not chunk.first:
            chunk.input_tokens, chunk.cached_tokens = self.prompt_tokens, self.cached_tokens
        return chunk

    def result(self) -> Result:
        """Returns the result, once it has ended."""
        return self.writing.result(self.prompt_tokens, self.cached_tokens)

    async def compute(
        self,
        engine: EngineProcess,
        slots: EngineSlots,
        permits: ReadingPermits,
        part_tokens: int,
        on_work: OnWork,
    ) -> None:
        """Reads the prompt and writes the text. Stops if it is canceled.

        Args:
            slots: slots of the engine, of which one is free.
            part_tokens: number of prompt tokens to read at a time.
            on_work: called after each part that was read, and each token.
        """
        ids = self.ids
        place, known = slots.take(self.item.owner, ids)
        computed: Sequence[int] = ()
        permit: ReadingPermit | None = None
        try:
            request = Asked(ids, place.number, keeps=bool(known))
            while True:
                is_last = len(ids) - known <= part_tokens
                end = len(ids) if is_last else known + part_tokens
                permit = await permits.begin(self.item.owner, end - known)
                if is_last:
                    break
                reply = await self._ask(engine, replace(request, ids=ids[:end]))
                permit.end()
                self._note_cached(reply)
                on_work(self.slot, end - known)
                known, request, computed = end, replace(request, keeps=True), ids[:end]
            await self._write(engine, request, permit, len(ids) - known, on_work)
            computed = self.ids[:-1]
        finally:
            if permit is not None:
                permit.end()
            slots.free(place, computed)

    async def _write(
        self,
        engine: EngineProcess,
        asked: Asked,
        permit: ReadingPermit,
        unread: int,
        on_work: OnWork,
    ) -> None:
        while self.writing.finish is None:
            asked, self._asked_at = replace(asked, ids=self.ids), self._at
            if self._goes_in_pieces():
                replies = self._write_piece(engine, asked)
            else:
                replies = self._stream(engine, asked)
            async with aclosing(replies):
                async for reply in replies:
                    self._note_cached(reply)
                    if reply.prompt_progress is not None:
                        continue
                    permit.end()
                    on_work(self.slot, unread + len(reply.tokens))
                    unread = 0
                    self._take(reply)
                    if self.writing.finish is not None or self._goes_in_pieces(is_streaming=True):
                        break
            asked = replace(asked, keeps=True)

    def _goes_in_pieces(self, *, is_streaming: bool = False) -> bool:
        item = self.item
        if self._has_lost or self.writing.must_end_number:
            return True
        if is_streaming:
            return False
        penalizes = bool(item.frequency_penalty or item.presence_penalty)
        return item.logprobs >= 0 or penalizes or bool(item.json_schema and self.writing.ids)

    async def _stream(self, engine: EngineProcess, asked: Asked) -> AsyncGenerator[Reply]:
        """Yields replies until the whole text is written."""
        tokens = self.item.max_tokens - self._at
        asked = replace(asked, tokens=tokens, is_streamed=True, is_free=False)
        async with engine.post(PATH, request_of(self.item, asked)) as response:
            if response.status != 200:
                decode_reply(await response.read())
            async for data in read_events(response):
                yield decode_reply(data)

    async def _write_piece(self, engine: EngineProcess, asked: Asked) -> AsyncGenerator[Reply]:
        """The next tokens."""
        item = self.item
        bias = self._bias()
        is_plain = bias is None
        most = PIECE_TOKENS if is_plain else 1
        tokens = min(most, item.max_tokens - len(self.writing.ids))
        reply = await self._ask(engine, replace(asked, tokens=tokens, bias=bias))
        if item.logprobs >= 0:
            await self._complete_chances(engine, asked, reply)
        yield reply

    async def _complete_chances(self, engine: EngineProcess, asked: Asked, reply: Reply) -> None:
        """Adds the log probabilities of the tokens that begin a character: it leaves them out."""
        by_token = iter(reply.completion_probabilities)
        candidate = next(by_token, None)
        whole = []
        for at, token in enumerate(reply.tokens):
            if candidate is not None and candidate.id == token:
                whole.append(candidate)
                candidate = next(by_token, None)
            else:
                ids = [*asked.ids, *reply.tokens[:at]]
                whole.append(await self._look_up(engine, replace(asked, ids=ids), token))
        reply.completion_probabilities = whole

    async def _look_up(self, engine: EngineProcess, asked: Asked, token: int) -> Chosen:
        """Returns the log probabilities for a token and for the likeliest tokens.

        The engine is forced to choose a token that is a whole character, and still reports the
        tokens that it would have preferred.
        """
        asked = replace(asked, tokens=1, keeps=True, bias={self._vocabulary.plain_token: _FORCING})
        for most in (_LOOKED_UP, self._vocabulary.size):
            body = request_of(self.item, asked) | {"n_probs": most}
            async with engine.post(PATH, body) as response:
                reply = decode_reply(await response.read())
            best = reply.completion_probabilities[0].top_logprobs
            for candidate in best:
                if candidate.id == token:
                    top = best[: max(1, self.item.logprobs)]
                    return Chosen(id=token, logprob=candidate.logprob, top_logprobs=top)
        raise ModelFailed(NO_NUMBERS)

    def _bias(self) -> dict[int, float] | None:
        """Returns the logit biases for the next token alone. None: only logit_bias."""
        item = self.item
        allowed = self.writing.allowed()
        penalizes = bool(item.frequency_penalty or item.presence_penalty)
        if allowed is None and not penalizes:
            return None
        bias = dict(item.logit_bias)
        if penalizes:
            tokens, counts = np.unique(np.asarray(self.writing.ids, np.int64), return_counts=True)
            less = item.frequency_penalty * counts + item.presence_penalty
            for token, less_bias in zip(tokens.tolist(), less.tolist(), strict=True):
                bias[token] = bias.get(token, 0.0) - less_bias
        if allowed is None:
            return bias
        excluded = np.flatnonzero(~allowed)
        if 2 * len(excluded) <= len(allowed):
            return bias | dict.fromkeys(excluded.tolist(), _EXCLUDED_BIAS)
        return {
            token: bias.get(token, 0.0) + _ALLOWED_BIAS
            for token in np.flatnonzero(allowed).tolist()
        }

    async def _ask(self, engine: EngineProcess, asked: Asked) -> Reply:
        async with engine.post(PATH, request_of(self.item, asked)) as response:
            return decode_reply(await response.read())

    def _note_cached(self, reply: Reply) -> None:
        if self._cached_tokens is None:
            self._cached_tokens = reply.cached_tokens

    def _take(self, reply: Reply) -> None:
        """Processes written tokens.

        Raises:
            PenstockError: the text can't continue, or does not match its schema.
        """
        chances = reply.completion_probabilities
        for at, token in enumerate(self._whole(reply)):
            if self.writing.finish is not None:
                return
            if not self.writing.allows(token):
                # Its grammar supports fewer schemas than ours. The rest is written in pieces.
                self._has_lost = True
                return
            chosen = chances[at] if at < len(chances) else None
            row = None
            if chosen is not None and self.item.logprobs >= 0:
                row = {chance.id: chance.logprob for chance in chosen.top_logprobs}
                row[token] = chosen.logprob
            self.writing.add_chosen(token, row)
        if reply.stop and reply.stop_type == "eos":
            self.writing.end()

    def _whole(self, reply: Reply) -> list[int]:
        """Returns the tokens of a reply, including earlier tokens that a stream left out.

        A stream leaves out all tokens of a character except the last one. They are reconstructed
        from the text, if the model wrote it like its tokenizer would. If not, it is written again,
        in pieces.
        """
        missing = self._asked_at + reply.tokens_predicted - self._at - len(reply.tokens)
        if missing <= 0 or self._has_lost:
            return reply.tokens
        ids: list[int] = self._vocabulary.plain_tokenizer.encode(
            reply.content, add_special_tokens=False
        ).ids
        if reply.tokens and len(ids) == missing + 1 and ids[-1] == reply.tokens[-1]:
            return ids
        self._has_lost = True
        return []

    @property
    def _at(self) -> int:
        return len(self.writing.ids)


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events, each on one line."""
    buffer = b""
    async for data in response.content.iter_any():
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            kind, _, value = line.partition(b": ")
            if kind in (b"data", b"error") and value != b"[DONE]":
                yield value
