"""A text model's tokenizer: token IDs to bytes, end-of-text tokens, and grammars.

Doesn't import torch.
"""

from __future__ import annotations

import json
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.errors import ConfigurationError

WHITESPACE = r"(\n(\t{0,8}|[ ]{0,40})|[ ]{0,2})"
"""Whitespace between the parts of JSON: a line break with indentation, or up to two spaces.
Otherwise, a model that repeats itself would write line break after line break until it ran out of
tokens. A schema may specify a different pattern.
"""
_MATCHERS_KEPT = 64
_OPTIONAL = frozenset({"generation_config.json", "tokenizer_config.json"})


class Vocabulary:
    """A model's tokens, as described by the files in its folder.

    Raises:
        ConfigurationError: a file is missing or broken, or there is no end-of-text token.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = _open_tokenizer(folder / "tokenizer.json")
        self.config = self.read("config.json")
        self.size = self._read_size()
        """The number of logits, which can differ from the number of tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {
            token: added_token.content
            for token, added_token in added.items()
            if added_token.special
        }
        """Control tokens, with their texts."""
        self.ends = frozenset(self._read_ends())
        self._build_lock = threading.Lock()
        self._matchers: dict[str, LLMatcher] = {}
        self._bytes: dict[int, bytes] = {}
        """Bytes of the tokens that have been used."""

    def load(self) -> None:
        """Loads what is otherwise loaded at its first use."""
        _ = self._grammar_tokens, self._byte_ff, self.plain_tokenizer

    def read(self, name: str) -> dict[str, Any]:
        """Returns the contents of one of the folder's JSON files.

        Raises:
            ConfigurationError: the file is missing or broken.
        """
        path = self.folder / name
        if name in _OPTIONAL and not path.is_file():
            return {}
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: {error}", field="source") from error
        if not isinstance(document, dict):
            raise ConfigurationError(f"{path}: must be a JSON object", field="source")
        return document

    def _read_size(self) -> int:
        size = self.config.get("vocab_size") or self.tokenizer.get_vocab_size()
        if not isinstance(size, int) or size < 1:
            raise ConfigurationError(
                f"{self.folder / 'config.json'}: vocab_size must be a whole number of at least 1",
                field="source",
            )
        return size

    def _read_ends(self) -> list[int]:
        """Returns the end-of-text tokens from the first file that lists any.

        The order is generation_config.json, config.json, and the `eos_token` in
        tokenizer_config.json.

        Raises:
            ConfigurationError: a token is not in the vocabulary, or no file lists any.
        """
        for name in ("generation_config.json", "config.json"):
            listed = self.read(name).get("eos_token_id")
            ends = listed if isinstance(listed, list) else [] if listed is None else [listed]
            if wrong := [end for end in ends if not self._is_token(end)]:
                raise ConfigurationError(
                    f"{self.folder / name}: eos_token_id must be token IDs below "
                    f"{self.grammar_size}, got {json.dumps(wrong[0])[:80]}",
                    field="source",
                )
            if ends:
                return ends
        eos = self.read("tokenizer_config.json").get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        token_id = self.tokenizer.token_to_id(text) if isinstance(text, str) else None
        if token_id is None:
            raise ConfigurationError(
                f"{self.folder}: does not specify eos_token_id", field="source"
            )
        return [token_id]

    def _is_token(self, value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return 0 <= value < self.grammar_size

    @cached_property
    def plain_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer for callers' texts, which does not recognize control tokens."""
        tokenizer = _open_tokenizer(self.folder / "tokenizer.json")
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _grammar_tokens(self) -> LLTokenizer:
        return LLTokenizer(
            self.tokenizer.to_str(), n_vocab=self.grammar_size, eos_token=sorted(self.ends)
        )

    @property
    def grammar_size(self) -> int:
        """The number of tokens covered by a matcher's mask."""
        return max(self.size, self.tokenizer.get_vocab_size())

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token's text. A control token has no such bytes."""
        if (data := self._bytes.get(token)) is None:
            data = self._bytes[token] = self._find_bytes(token)
        return data

    def _find_bytes(self, token: int) -> bytes:
        if token in self.special or token in self.ends or token >= self._grammar_tokens.vocab_size:
            return b""
        data: bytes = self._grammar_tokens.decode_bytes([token])
        # The library marks control tokens with this byte, and mistakes the byte itself for a
        # control token.
        return b"\xff" if not data and token in self._byte_ff else data

    def read_shown_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token's text. A control token's text is only its name."""
        return self.token_bytes(token) or self.special.get(token, "").encode()

    @cached_property
    def plain_token(self) -> int:
        return next(token for token in range(self.size) if self.token_bytes(token).isalpha())

    @cached_property
    def digits(self) -> NDArray[np.bool_]:
        """Returns a mask of the tokens that start with any digit, [size] bool."""
        return np.array([self._find_bytes(token)[:1].isdigit() for token in range(self.size)])

    @cached_property
    def zeros(self) -> NDArray[np.bool_]:
        """Returns a mask of the tokens that start with the digit 0, [size] bool."""
        return np.array([self._find_bytes(token)[:1] == b"0" for token in range(self.size)])

    @cached_property
    def _byte_ff(self) -> frozenset[int]:
        """Returns the tokens for the byte 0xff, which UTF-8 never uses: byte-level and fallback."""
        named = (self.tokenizer.token_to_id(name) for name in ("\u00ff", "<0xFF>"))
        return frozenset(token for token in named if token is not None)

    def matcher(self, json_schema: str) -> LLMatcher:
        """Returns a matcher for JSON texts with this schema. Caches the most recent matchers.

        Raises:
            ValueError: the schema is not valid, or has parts that are not supported.
        """
        with self._build_lock:
            matcher = self._matchers.pop(json_schema, None) or self._make_matcher(json_schema)
            self._matchers[json_schema] = matcher
            if len(self._matchers) > _MATCHERS_KEPT:
                self._matchers.pop(next(iter(self._matchers)))
            return matcher.deep_copy()

    def _make_matcher(self, json_schema: str) -> LLMatcher:
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json_schema, defaults={"whitespace_pattern": WHITESPACE}
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"the schema is not a JSON object: {error}") from error
        matcher = LLMatcher(self._grammar_tokens, grammar, log_level=0)
        if not matcher.is_error():
            self._try_token(trial := matcher.deep_copy())
            if trial.is_error():
                matcher = trial
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def _try_token(self, matcher: LLMatcher) -> None:
        """Tries a token.

        Some schemas, such as those with too many alternatives, fail only here.
        """
        mask = np.empty(-(-self.grammar_size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if len(allowed):
            matcher.consume_token(int(allowed[0]))


def _open_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a broken file
        raise ConfigurationError(f"{path}: {error}", field="source") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
