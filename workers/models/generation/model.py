"""A language model with continuous batching: generations join and leave between tokens.

A step reads at most `generation.chunk_tokens` prompt tokens, with tenants taking turns, and
generates one token for each text whose prompt has been read. A long prompt therefore delays the
other texts by only one part at a time. A step that generates a text's first token ends there, so
that the token can be sent immediately. The others continue in the next step.

If only one text is being generated, it may get several tokens in a step, all but the first of them
guessed (`generation.lookup_tokens`). If there were other texts, each guessed token would take time
away from them.

The prefill order is round-robin across tenants.

Guesses are prompt-lookup speculative decoding: a generation is expected to continue the way its
prompt or its own output did earlier, after the same words. The model checks a guess in one pass and
drops any tokens that it would not have generated. The text is therefore unaffected, and a
generation that quotes earlier text takes fewer passes. Saxena, Prompt lookup decoding, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.text import TokenChunk
from workers.models.base import OutOfMemory, PreparedItem, PreparedPrompt, StepEnd
from workers.models.device import Device
from workers.models.generation.decoder import Decoder
from workers.models.generation.slots import KvRow, KvRows
from workers.models.generation.vocabulary import Vocabulary
from workers.models.generation.writing import IDS, Writing

_MATCHED_TOKENS = 3
"""Number of tokens that must match. Two tokens match by chance too often, and wrong guesses cost
time.
"""
_FIRST_GUESS_TOKENS = 4
_ECHO_TOKENS = 32
"""Number of prompt tokens per pass that get log probabilities. Each token takes 0.2 to 1 MB of
logits.
"""


class PromptLookup:
    """One generation's guesses."""

    def __init__(self, max_tokens: int) -> None:
        self._longest = max_tokens
        self._now = min(_FIRST_GUESS_TOKENS, max_tokens)
        self._next: dict[tuple[int, ...], int] = {}
        """The position where the generation last continued after these tokens."""
        self._known = _MATCHED_TOKENS

    def guess(self, ids: Sequence[int], room: int) -> list[int]:
        """Returns up to `room` tokens that are likely to follow `ids`.

        Empty if the tokens at the end of `ids` have not occurred before.

        Args:
            ids: all of the generation's tokens so far, starting with those from the previous call.
            room: maximum number of tokens worth guessing.
        """
        for at in range(self._known, len(ids)):
            self._next[tuple(ids[at - _MATCHED_TOKENS : at])] = at
        self._known = max(self._known, len(ids))
        position = self._next.get(tuple(ids[-_MATCHED_TOKENS:]))
        if position is None:
            return []
        period = len(ids) - position
        # Beyond the end of the generated text, the guess repeats itself.
        return [ids[position + offset % period] for offset in range(min(self._now, room))]

    def learn(self, guessed: int, right: int) -> None:
        """Makes the next guess longer after a correct one, or else as long as its correct part."""
        self._now = min(2 * guessed, self._longest) if right == guessed else max(1, right)


class PrefillOrder:
    """Owners take turns reading parts of their prompts. Each owner's own prompts are read in order.

    If prompts were read strictly in order of arrival, a short prompt would wait for all of another
    owner's long prompts.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        """When each owner's prompt was last read, as a count of parts."""

    def order(self, owners: Sequence[str]) -> list[int]:
        """Returns indices of `owners` in round-robin order."""
        self._last = {owner: self._last.get(owner, 0) for owner in owners}
        read_before: dict[str, int] = {}
        keys = []
        for index, owner in enumerate(owners):
            rank = read_before[owner] = read_before.get(owner, -1) + 1
            keys.append((rank, self._last[owner], index))
        return [index for _, _, index in sorted(keys)]

    def took(self, owner: str) -> None:
        """Records that a part of this owner's prompt was read."""
        self._last[owner] = max(self._last.values(), default=0) + 1


class _Generation:
    """An admitted item."""

    def __init__(
        self, slot: int, item: PreparedPrompt, writing: Writing, lookup_tokens: int
    ) -> None:
        self.slot = slot
        self.item = item
        self.writing = writing
        self.prompt_tokens = len(item.ids) // IDS.itemsize
        self.ids: list[int] = [*np.frombuffer(item.ids, IDS).tolist(), *writing.ids]
        """All of the generation's tokens. The last one has no keys and values yet."""
        self.cached_tokens = 0
        self.row: KvRow | None = None
        self.lookup = PromptLookup(lookup_tokens)

    @property
    def unread(self) -> int:
        """Number of tokens without keys and values. If 1, tokens are being generated.

        If more, the prompt is being read.
        """
        assert self.row is not None, "a generation that ended has no row; this is a bug"
        return len(self.ids) - len(self.row.ids)

    @property
    def is_read_in_part(self) -> bool:
        """True if there is more of its prompt to read."""
        return self.row is not None and (self.unread > 1 or not self.writing.ids)

    @property
    def echoes_logprobs(self) -> bool:
        """True if all prompt tokens get log probabilities."""
        return self.item.is_echoed and self.item.logprobs >= 0

    def chunk_tokens(self, limit: int) -> int:
        """Returns how many prompt tokens to read at a time, at most `limit`."""
        return min(limit, _ECHO_TOKENS) if self.echoes_logprobs else limit

    def guess(self, capacity: int) -> list[int]:
        """Returns tokens that may follow the one that the model chooses next."""
        room = min(capacity - len(self.ids), self.item.max_tokens - len(self.writing.ids) - 1)
        return self.lookup.guess(self.ids, room)

    def chunk(self) -> TokenChunk | None:
        """Returns the text generated since the last call, or None if there is none."""
        chunk = self.writing.take_chunk()
        if chunk is not None and not chunk.first:
            chunk.input_tokens, chunk.cached_tokens = self.prompt_tokens, self.cached_tokens
        return chunk

    def result(self) -> Result:
        return self.writing.result(self.prompt_tokens, self.cached_tokens)


class GenerationModel:
    """A transformers causal language model with a row of keys and values for each generation."""

    device_name = ""

    def __init__(self, entry: Model, folder: Path, device: Device) -> None:
        self._budget = entry.batch.max_tokens or entry.generation.context_tokens
        self._chunk_tokens = entry.generation.chunk_tokens
        self._lookup_tokens = entry.generation.lookup_tokens
        self._shares_with_all = entry.cache.scope == "global"
        rows = min(entry.batch.max_items, self._budget)
        capacity = entry.generation.context_tokens
        self._folder = folder
        self._decoder = Decoder(folder, device, entry.precision, rows, capacity)
        self._rows = KvRows(rows)
        self._generations: dict[int, _Generation] = {}
        self._turns = PrefillOrder()
        self._others_wait = False
        """True if the last step generated only first tokens."""

    def setup(self) -> None:
        """Loads the model.

        Raises:
            ConfigurationError: the folder is not a language model, or does not match the catalog.
        """
        self._vocabulary = Vocabulary(self._folder)
        self._decoder.open()
        self.device_name = self._decoder.device_name

    def warmup(self) -> None:
        """Reads a prompt and generates a few tokens, individually and in a batch."""
        ids = np.zeros(min(16, self._decoder.slots.capacity - 4), np.int64)
        self._decoder.read(0, 0, ids, ends=False)
        self._decoder.read(0, 0, ids)
        for rows in {1, min(4, len(self._rows.all)), len(self._rows.all)}:
            self._decoder.decode(np.zeros(rows, np.int64), np.full(rows, len(ids), np.int64))

    def admit(self, slot: int, item: PreparedItem) -> None:
        """Admits a prompt.

        Raises:
            OutOfMemory: no tokens or rows are left in the budget.
            PenstockError: the item can't be computed.
        """
        if not isinstance(item, PreparedPrompt):
            raise ModelFailed(f"a text model can't process {type(item).__name__}")
        used_tokens = sum(generation.item.length for generation in self._generations.values())
        if (
            len(self._generations) >= len(self._rows.all)
            or used_tokens + item.length > self._budget
        ):
            raise OutOfMemory(f"{used_tokens} of {self._budget} tokens are in use")
        generation = _Generation(slot, item, Writing(item, self._vocabulary), self._lookup_tokens)
        if generation.writing.finish is None:
            self._give_row(generation)
        self._generations[slot] = generation

    def _give_row(self, generation: _Generation) -> None:
        """Assigns a row, preferably one that already has the generation's first tokens."""
        owner = "*" if self._shares_with_all else generation.item.owner
        # Shared tokens are not computed, so they have no log probabilities.
        known = [] if generation.echoes_logprobs else generation.ids[:-1]
        row, source, shared = self._rows.find(known, owner)
        if source is not None:
            self._decoder.slots.copy(source.number, row.number, shared)
        self._rows.take(row, generation.ids[:shared], owner)
        generation.row = row
        generation.cached_tokens = min(shared, generation.prompt_tokens)
        if generation.item.written_ids:  # the generation's own row may remain from an earlier run
            generation.cached_tokens = generation.item.written_cached_tokens

    def step(self) -> StepEnd:
        """Reads parts of the prompts, and generates a token for each text whose prompt is complete.

        Raises:
            Exception: the model failed. All admitted generations are dropped.
        """
        end = StepEnd()
        try:
            if not self._read(end) or self._others_wait:
                self._write(end)
                self._others_wait = False
            else:
                self._others_wait = True
            for slot, generation in list(self._generations.items()):
                if generation.writing.finish is not None:
                    self._leave(slot)
                    end.results[slot] = generation.result()
        except BaseException:
            for slot in list(self._generations):
                self.drop(slot)
            raise
        return end

    def _read(self, end: StepEnd) -> bool:
        """Reads at most `chunk_tokens` prompt tokens. Owners take turns.

        Returns whether a prompt was read to its end, so that its generation has a first token.
        """
        tokens_left, has_first = self._chunk_tokens, False
        waiting = [
            generation for generation in self._generations.values() if generation.is_read_in_part
        ]
        for at in self._turns.order([generation.item.owner for generation in waiting]):
            if tokens_left == 0:
                break
            generation = waiting[at]
            assert generation.row is not None, "this is a bug"
            self._turns.took(generation.item.owner)
            start = len(generation.row.ids)
            part = generation.ids[start : start + generation.chunk_tokens(tokens_left)]
            tokens_left -= len(part)
            ends = start + len(part) == len(generation.ids)
            try:
                logits = self._read_part(generation, start, part, ends=ends)
            except OutOfMemory as error:
                self._make_room(end, error)
                break
            generation.row.ids.extend(part)
            end.work += len(part)
            if logits is not None:
                has_first = True
                self._add_token(generation, logits, end)
        return has_first

    def _read_part(
        self, generation: _Generation, start: int, part: list[int], *, ends: bool
    ) -> Any:
        """Reads part of a prompt.

        Returns the logits after that part if the prompt ends there, or None otherwise.
        """
        assert generation.row is not None, "this is a bug"
        if not generation.echoes_logprobs:
            return self._decoder.read(generation.row.number, start, np.array(part), ends=ends)
        logits = self._decoder.read_all(generation.row.number, start, np.array(part))
        following = generation.ids[start + 1 : min(start + len(part) + 1, generation.prompt_tokens)]
        generation.writing.echo(logits[: len(following)], following)
        return logits[-1] if ends else None

    def _write(self, end: StepEnd) -> None:
        """Generates one token for each text whose prompt has been read."""
        generations = [
            generation
            for generation in self._generations.values()
            if generation.row is not None
            and generation.unread == 1
            and generation.writing.finish is None
        ]
        if not generations:
            return
        if self._lookup_tokens and len(generations) == 1:
            guessed = generations[0].guess(self._decoder.slots.capacity)
            if guessed and self._check_guess(generations[0], guessed, end):
                return
        for slot, other, tokens in self._rows.gather(
            [generation.row for generation in generations if generation.row]
        ):
            self._decoder.slots.exchange(slot, other, tokens)
        generations.sort(key=lambda generation: generation.row.number if generation.row else 0)
        try:
            logits = self._decoder.decode(
                np.array([generation.ids[-1] for generation in generations]),
                np.array([len(generation.ids) - 1 for generation in generations]),
            )
        except OutOfMemory as error:
            self._make_room(end, error)
            return
        end.work += len(generations)
        for generation, row in zip(generations, logits, strict=True):
            assert generation.row is not None, "this is a bug"
            generation.row.ids.append(generation.ids[-1])
            self._add_token(generation, row, end)

    def _check_guess(self, generation: _Generation, guessed: list[int], end: StepEnd) -> bool:
        """Generates tokens for as long as they match the guess, plus one more.

        Returns False if the guess results in numbers that aren't finite. The generation may still
        continue without a guess.
        """
        assert generation.row is not None, "this is a bug"
        start = len(generation.row.ids)
        try:
            tokens = np.array([generation.ids[-1], *guessed])
            logits = self._decoder.read_all(generation.row.number, start, tokens)
        except OutOfMemory as error:
            self._make_room(end, error)
            return True
        if np.isnan(logits).any():
            self._decoder.slots.clear(generation.row.number, start)
            generation.lookup.learn(len(guessed), 0)
            return False
        end.work += len(tokens)
        right = 0
        for token, row in zip([*guessed, None], logits, strict=True):
            generation.row.ids.append(generation.ids[-1])
            self._add_token(generation, row, end)
            has_ended = generation.slot in end.results or generation.writing.finish is not None
            if has_ended or generation.ids[-1] != token:
                break
            right += 1
        generation.lookup.learn(len(guessed), right)
        return True

    def _add_token(self, generation: _Generation, logits: np.ndarray, end: StepEnd) -> None:
        try:
            generation.ids.append(generation.writing.write(logits))
        except PenstockError as error:
            # The row's values may be NaN, which would corrupt the next generation that gets the
            # row.
            self._forget(generation)
            self._leave(generation.slot)
            end.results[generation.slot] = error

    def _make_room(self, end: StepEnd, error: OutOfMemory) -> None:
        """Sends the newest generation back to its queue. If it is the only one, it fails."""
        slot, generation = list(self._generations.items())[-1]
        is_only = len(self._generations) == 1
        self._forget(generation)
        self._leave(slot)
        if is_only:
            end.results[slot] = error
        else:
            end.preempted.append(slot)

    def _forget(self, generation: _Generation) -> None:
        if generation.row is not None:
            self._decoder.slots.clear(generation.row.number)
            generation.row.ids.clear()

    def _leave(self, slot: int) -> None:
        generation = self._generations.pop(slot)
        if generation.row is not None:
            self._rows.free(generation.row)

    def take_chunks(self) -> dict[int, TokenChunk]:
        """Returns the text that each streamed generation has produced since the last call."""
        chunks = {
            slot: generation.chunk()
            for slot, generation in self._generations.items()
            if generation.item.is_streamed
        }
        return {slot: chunk for slot, chunk in chunks.items() if chunk is not None}

    def interrupt(self, slot: int) -> TokenChunk | None:
        """Removes an admitted generation.

        Its row keeps its contents until it is assigned to another generation.
        """
        chunk = self._generations[slot].chunk()
        self._leave(slot)
        return chunk

    def drop(self, slot: int) -> None:
        if slot in self._generations:
            self._leave(slot)
