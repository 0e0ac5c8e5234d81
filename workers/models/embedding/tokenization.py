"""Converts texts to token IDs in the I/O process, in batches, using the model's tokenizer.json.

The tokenizer itself never truncates, because it would not report truncation and would not be any
faster.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from shared.errors import BadInput, ConfigurationError, ContextLengthExceeded
from shared.models.tasks import Input
from shared.models.tasks.embedding import (
    TextInput,
    TextTokens,
    TextToTokenize,
    TokensInput,
    Truncate,
)
from workers.models.base import PreparedText
from workers.models.embedding.model_folder import read_sentence_folder, vocabulary_size

_IDS = np.dtype("<u4")


class TextPreparer:
    """Prepares TextInput and TokensInput as sentence-transformers does, and handles TextToTokenize.

    Raises:
        ConfigurationError: the folder does not contain an embedding model.
    """

    def __init__(self, folder: Path) -> None:
        self._settings = read_sentence_folder(folder)
        self._tokenizer = open_tokenizer(
            self._settings.transformer, lower_case=self._settings.lower_case
        )
        self._prefix, self._suffix = _template(self._tokenizer)
        self._prompt_ids = self._tokenizer.encode(
            self._settings.prompt, add_special_tokens=False
        ).ids
        self._own = len(self._prefix) + len(self._prompt_ids) + len(self._suffix)
        """Number of tokens in each text that don't come from the caller."""
        self._vocabulary = _vocabulary(self._settings.transformer, self._tokenizer)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens per text, including special tokens and prompt."""
        return self._settings.max_length

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText | TextTokens | BadInput]:
        """Returns one outcome per input, in order.

        A text that is too long is rejected or truncated, depending on the input.
        """
        texts = [index for index, value in enumerate(inputs) if isinstance(value, TextInput)]
        outcomes: dict[int, PreparedText | TextTokens | BadInput] = dict(
            zip(texts, self._tokenize([inputs[index] for index in texts]), strict=True)
        )
        for index, value in enumerate(inputs):
            if isinstance(value, TokensInput):
                outcomes[index] = self._frame(value)
            elif isinstance(value, TextToTokenize):
                outcomes[index] = self._locate(value.text)
            elif index not in outcomes:
                outcomes[index] = BadInput(
                    "the input to an embedding model must be texts or token IDs", field="input"
                )
        return [outcomes[index] for index in range(len(inputs))]

    def _tokenize(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
        texts = [value for value in inputs if isinstance(value, TextInput)]
        try:
            encodings = self._tokenizer.encode_batch_fast(
                [self._settings.prompt + value.text for value in texts]
            )
        except (TypeError, ValueError) as error:
            # A lone surrogate is valid in a str, but makes the whole call fail.
            if len(inputs) == 1:
                return [BadInput(f"the text can't be tokenized: {error}", field="input")]
            return list(chain.from_iterable(self._tokenize([value]) for value in inputs))
        pairs = zip(texts, encodings, strict=True)
        return [
            self._prepare_ids(encoding.ids, encoding.type_ids, value.truncate, value.max_tokens)
            for value, encoding in pairs
        ]

    def _locate(self, text: str) -> TextTokens | BadInput:
        """Returns the start positions of a text's tokens.

        Parts of a word that have no start position are skipped.
        """
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, ValueError) as error:
            return BadInput(f"the text can't be tokenized: {error}", field="input")
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
        starts = np.array([start for start, _ in encoding.offsets], _IDS)
        return TextTokens(
            starts=starts.tobytes(),
            begins_word=(np.diff(words, prepend=-2) != 0).astype(np.uint8).tobytes(),
            max_tokens=self._settings.max_length - self._own,
        )

    def _frame(self, value: TokensInput) -> PreparedText | BadInput:
        for position, token in enumerate(value.tokens):
            if not 0 <= token < self._vocabulary:
                reason = f"token ID {token} at position {position} is not in the vocabulary"
                last = self._vocabulary - 1
                return BadInput(f"{reason}; the highest token ID is {last}", field="input")
        ids = [*self._prefix, *self._prompt_ids, *value.tokens, *self._suffix]
        return self._prepare_ids(ids, (), value.truncate)

    def _prepare_ids(
        self, ids: list[int], type_ids: Sequence[int], truncate: Truncate, max_tokens: int = 0
    ) -> PreparedText | BadInput:
        limit = self._settings.max_length
        if max_tokens:
            limit = min(limit, max_tokens + self._own)
        beyond = len(ids) - limit
        if beyond > 0:
            if truncate == "none":
                return too_long(len(ids), limit)
            at = self._cut_at(ids, beyond, truncate)
            ids, type_ids = (
                [*ids[:at], *ids[at + beyond :]],
                [*type_ids[:at], *type_ids[at + beyond :]],
            )
        return PreparedText(
            key="",
            length=len(ids),
            ids=_pack_ids(ids),
            type_ids=_pack_ids(type_ids) if any(type_ids) else b"",
            truncated_tokens=max(0, beyond),
        )

    def _cut_at(self, ids: list[int], beyond: int, truncate: Truncate) -> int:
        """Returns the position to truncate at to drop `beyond` tokens.

        Special tokens and the model's prompt are kept.
        """
        end = len(ids) - len(self._suffix) - beyond
        if truncate == "end":
            return end
        body = zip(ids[len(self._prefix) :], self._prompt_ids, strict=False)
        prompt = takewhile(lambda pair: pair[0] == pair[1], body)
        return min(end, len(self._prefix) + len(list(prompt)))


def _pack_ids(ids: Sequence[int]) -> bytes:
    """Returns IDs as little-endian uint32. For a short text, numpy takes four times as long."""
    return struct.pack(f"<{len(ids)}I", *ids)


def too_long(tokens: int, limit: int) -> ContextLengthExceeded:
    """Returns the error for a text with too many tokens.

    It starts the same way as OpenAI's message, because clients and proxies check for that wording.
    """
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens, "
        f"however you requested {tokens} tokens (special tokens "
        'included). Shorten the text, or send "truncate": "end" or "start" to have it cut.',
        field="input",
    )


def open_tokenizer(folder: Path, *, lower_case: bool = False) -> Tokenizer:
    """Opens a folder's tokenizer.json, set to neither truncate nor pad.

    Raises:
        ConfigurationError: the file is missing or broken.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a broken file
        raise ConfigurationError(f"{path}: {error}", field="source") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if lower_case:
        steps = [Lowercase()] + ([tokenizer.normalizer] if tokenizer.normalizer else [])
        tokenizer.normalizer = NormalizerSequence(steps)
    return tokenizer


def _template(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the special tokens around a text, found by tokenizing with and without them."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return full[:start], full[start + len(bare) :]


def _vocabulary(transformer: Path, tokenizer: Tokenizer) -> int:
    """Returns how many token IDs have both a token and a row in the embedding table."""
    tokens: int = tokenizer.get_vocab_size()
    return min(vocabulary_size(transformer) or tokens, tokens)
