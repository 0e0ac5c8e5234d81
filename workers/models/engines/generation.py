"""One text that an engine writes.

Its prompt is read in parts, so that no other text waits for more than one part, and so that a
caller who leaves costs no more than that. The text is then written as a stream.

Some texts are written in pieces instead, with a separate request for each: texts that the engine
can't stream exactly, and the rest of any JSON in which its grammar did not enforce the schema. In
these texts, each token is chosen from the tokens that the schema allows.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from shared.errors import ModelFailed
from shared.models.tasks import Result
from shared.models.tasks.text import TokenChunk
from workers.models.base import PreparedPrompt
from workers.models.engines.dialect import Asked, EngineDialect, Post, Reply
from workers.models.engines.slots import EngineSlots, ReadingPermit, ReadingPermits
from workers.models.generation.vocabulary import Vocabulary
from workers.models.generation.writing import IDS, Writing

PIECE_TOKENS = 8
"""Number of tokens to write per request if the engine chooses from all tokens."""
OnWork = Callable[[int, int, int], None]
"""Called as on_work(slot, tokens, steps) when an item's tokens were read or written."""


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
        self._must_echo = item.is_echoed and item.logprobs >= 0
        """True until the engine has reported the prompt's log probabilities."""
        self._has_lost = False
        """True if a stream has omitted tokens that can't be reconstructed, or violated the schema.
        """
        self.is_waiting = True
        """True while it waits for a slot, or for its turn to read its prompt."""

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were computed earlier."""
        return min(self._cached_tokens or 0, self.prompt_tokens)

    @property
    def ids(self) -> list[int]:
        """All of its tokens."""
        return [*self._prompt, *self.writing.ids]

    def share_prompt(self) -> None:
        """Counts its prompt as cached, because another of its owner's texts continues from it.

        A different slot reads it again, at no one's expense.
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
        """Returns the result, once the text has ended."""
        return self.writing.result(self.prompt_tokens, self.cached_tokens)

    async def compute(
        self,
        dialect: EngineDialect,
        post: Post,
        slots: EngineSlots,
        permits: ReadingPermits,
        part_tokens: int,
        on_work: OnWork,
    ) -> None:
        """Reads the prompt and writes the text. Stops if it is canceled.

        Args:
            post: sends a request to the engine.
            slots: the engine's slots, one of which is free.
            part_tokens: number of prompt tokens to read at a time.
            on_work: called after each part that was read, and each token.
        """
        ids = self.ids
        place, known = slots.take(self.item.owner, ids)
        computed: Sequence[int] = ()
        permit: ReadingPermit | None = None
        try:
            salt = self.item.owner or secrets.token_hex()
            request = Asked(ids, place.number, salt, keeps=bool(known))
            while True:
                is_last = len(ids) - known <= part_tokens
                end = len(ids) if is_last else known + part_tokens
                self.is_waiting = True
                permit = await permits.begin(self.item.owner, end - known)
                self.is_waiting = False
                if is_last:
                    break
                reply = await dialect.ask(post, self.item, replace(request, ids=ids[:end]))
                permit.end()
                self._note_prompt(reply)
                on_work(self.slot, end - known, 1)
                known, request, computed = end, replace(request, keeps=True), ids[:end]
            await self._write(dialect, post, request, permit, len(ids) - known, on_work)
            computed = self.ids[:-1]
        finally:
            if permit is not None:
                permit.end()
            slots.free(place, computed)

    async def _write(
        self,
        dialect: EngineDialect,
        post: Post,
        asked: Asked,
        permit: ReadingPermit,
        unread: int,
        on_work: OnWork,
    ) -> None:
        while self.writing.finish is None:
            counts, known = self._cached_tokens is None, len(self.writing.ids)
            asked = replace(asked, ids=self.ids, counts=counts, echoes=self._must_echo)
            if self._must_go_in_pieces() or not dialect.can_stream(
                self.item, has_written=bool(self.writing.ids)
            ):
                replies = self._write_piece(dialect, post, asked)
            else:
                tokens = self.item.max_tokens - len(self.writing.ids)
                replies = dialect.stream(post, self.item, replace(asked, tokens=tokens))
            async with aclosing(replies):
                async for together in replies:
                    for reply in together:
                        self._note_prompt(reply)
                    written = [reply for reply in together if reply.is_written]
                    if not written:
                        continue
                    permit.end()
                    tokens = sum(len(reply.tokens) for reply in written)
                    on_work(self.slot, unread + tokens, len(written))
                    unread = 0
                    if self._take_all(written):
                        break
            has_progressed = self._has_lost or len(self.writing.ids) > known
            if self.writing.finish is None and not has_progressed:
                raise ModelFailed("the engine returned a response without tokens")
            asked = replace(asked, keeps=True)

    def _must_go_in_pieces(self) -> bool:
        return self._has_lost or self.writing.must_end_number

    async def _write_piece(
        self, dialect: EngineDialect, post: Post, asked: Asked
    ) -> AsyncGenerator[list[Reply]]:
        """Writes the next tokens."""
        if asked.echoes:
            yield [await dialect.ask(post, self.item, asked)]
        bias, allowed = self._penalties(), self.writing.allowed()
        most = PIECE_TOKENS if bias is None and allowed is None else 1
        tokens = min(most, self.item.max_tokens - len(self.writing.ids))
        asked = replace(asked, tokens=tokens, bias=bias, allowed=allowed)
        yield [await dialect.ask(post, self.item, asked)]

    def _penalties(self) -> dict[int, float] | None:
        """Returns the logit biases for just the next token, or None if there is only logit_bias."""
        item = self.item
        if not (item.frequency_penalty or item.presence_penalty):
            return None
        bias = dict(item.logit_bias)
        tokens, counts = np.unique(np.asarray(self.writing.ids, np.int64), return_counts=True)
        less = item.frequency_penalty * counts + item.presence_penalty
        for token, less_bias in zip(tokens.tolist(), less.tolist(), strict=True):
            bias[token] = bias.get(token, 0.0) - less_bias
        return bias

    def _note_prompt(self, reply: Reply) -> None:
        if reply.prompt_chances and self._must_echo:
            self.writing.echo_chosen(reply.prompt_chances)
            self._must_echo = False
        if self._cached_tokens is None:
            self._cached_tokens = reply.cached_tokens

    def _take_all(self, replies: Sequence[Reply]) -> bool:
        """Processes replies up to the one that ends the text or its stream, if there is one.

        Returns whether there was one.
        """
        for reply in replies:
            self._take(reply)
            if self.writing.finish is not None or self._must_go_in_pieces():
                return True
        return False

    def _take(self, reply: Reply) -> None:
        """Processes written tokens.

        Raises:
            PenstockError: the text can't continue, or does not match its schema.
        """
        for at, token in enumerate(reply.tokens):
            if self.writing.finish is not None:
                return
            if not self.writing.allows(token):
                if self._has_lost:
                    raise ModelFailed("the engine chose a token that is not allowed")
                # Its grammar supports fewer schemas than ours, so the rest is written in pieces.
                self._has_lost = True
                return
            self.writing.add_chosen(token, reply.chances[at] if reply.chances else None)
        self._has_lost = self._has_lost or reply.has_lost
        if reply.has_ended:
            self.writing.end()
