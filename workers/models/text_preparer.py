"""Texts to token ids, in the I/O process: tokenised in batch by the model's own tokenizer.json, cut, checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from shared.errors import BadInput, ConfigurationError
from shared.messages import Input, TextInput, TokensInput
from workers.models.base import PreparedText
from workers.models.sentence_folder import SentenceFolder, read_sentence_folder

_IDS = np.dtype("<u4")


class TextPreparer:
    """Makes PreparedText of TextInput and TokensInput, as sentence-transformers would before its transformer.

    Raises:
        ConfigurationError: the folder is no embedding model.
    """

    def __init__(self, folder: Path) -> None:
        self._settings = read_sentence_folder(folder)
        self._tokenizer = _open_tokenizer(self._settings)
        self._prefix, self._suffix = _template(self._tokenizer)
        self._prompt_ids = self._tokenizer.encode(self._settings.prompt, add_special_tokens=False).ids
        self._vocabulary = _vocabulary(self._settings.transformer, self._tokenizer)

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
        """One outcome per input, in order; over-long inputs are cut to the model's length, as the reference does."""
        texts = [place for place, value in enumerate(inputs) if isinstance(value, TextInput)]
        outcomes = dict(zip(texts, self._tokenise([inputs[place] for place in texts]), strict=True))
        for place, value in enumerate(inputs):
            if isinstance(value, TokensInput):
                outcomes[place] = self._frame(value.tokens)
            elif place not in outcomes:
                outcomes[place] = BadInput("an embedding model takes texts or token ids", field="input")
        return [outcomes[place] for place in range(len(inputs))]

    def _tokenise(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
        texts = [self._settings.prompt + value.text for value in inputs if isinstance(value, TextInput)]
        try:
            return [_prepared(encoding) for encoding in self._tokenizer.encode_batch_fast(texts)]
        except (TypeError, ValueError) as error:
            # A lone surrogate is a str that is no Unicode text; it fails the whole call.
            if len(inputs) == 1:
                return [BadInput(f"the text can't be tokenised: {error}", field="input")]
            return list(chain.from_iterable(self._tokenise([value]) for value in inputs))

    def _frame(self, tokens: list[int]) -> PreparedText | BadInput:
        """Token ids between the special tokens that the tokenizer puts around one text."""
        wrong = next((token for token in tokens if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            return BadInput(f"token {wrong} is not in the vocabulary of {self._vocabulary}", field="input")
        room = self._settings.max_length - len(self._prefix) - len(self._suffix)
        ids = [*self._prefix, *[*self._prompt_ids, *tokens][:room], *self._suffix]
        return PreparedText(key="", length=len(ids), ids=np.array(ids, _IDS).tobytes())


def _prepared(encoding: Encoding) -> PreparedText:
    ids, type_ids = encoding.ids, encoding.type_ids
    types = np.array(type_ids, _IDS).tobytes() if any(type_ids) else b""
    return PreparedText(key="", length=len(ids), ids=np.array(ids, _IDS).tobytes(), type_ids=types)


def _open_tokenizer(settings: SentenceFolder) -> Tokenizer:
    path = settings.transformer / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ConfigurationError(f"{path}: {error}", field="source") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(settings.max_length)
    if settings.lower_case:
        steps = [Lowercase()] + ([tokenizer.normalizer] if tokenizer.normalizer else [])
        tokenizer.normalizer = NormalizerSequence(steps)
    return tokenizer


def _template(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens before and after one text, seen by tokenising one with and without them."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return full[:start], full[start + len(bare) :]


def _vocabulary(transformer: Path, tokenizer: Tokenizer) -> int:
    """Ids below this have a row in the embedding table, which may be shorter or longer than the tokenizer's list."""
    size = json.loads((transformer / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    return min(size or tokenizer.get_vocab_size(), tokenizer.get_vocab_size())
