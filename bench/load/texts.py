"""The benchmarks' texts: seeded, distinct, with known lengths in tokens."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

MIX = ((0.6, 5, 15), (0.3, 36, 88), (0.1, 200, 253))
"""Shares of the texts, with their minimum and maximum words: about 12, 64, and 230 tokens.

This resembles a product whose inputs are mostly queries, plus many paragraphs and a few pages.
"""


class Texts:
    """Generates texts from words that are each one token, so a text of n words has n + 2 tokens."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab()
        self._words = sorted(
            word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2
        )
        self._random = random.Random(seed)
        self._drawn: set[str] = set()

    def mixed(self, count: int) -> list[str]:
        texts = [
            self._draw(low, high) for share, low, high in MIX for _ in range(round(share * count))
        ]
        texts += [self._draw(*MIX[0][1:]) for _ in range(count - len(texts))]
        self._random.shuffle(texts)
        return texts[:count]

    def short(self, count: int) -> list[str]:
        """Returns `count` texts of about 12 tokens."""
        return [self._draw(*MIX[0][1:]) for _ in range(count)]

    def token_ids(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def _draw(self, low: int, high: int) -> str:
        while True:
            text = " ".join(self._random.choices(self._words, k=self._random.randint(low, high)))
            if text not in self._drawn:
                self._drawn.add(text)
                return text
