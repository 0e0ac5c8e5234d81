"""Two separate sets of English texts for calibrating and evaluating embedding variants.

english.txt has one subject per line. The two sets have disjoint subjects, so a variant is never
evaluated on anything it was calibrated on. The calibration set also includes word lists, which
stretch activations further than sentences do.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from shared.models.tasks.embedding import TextInput
from workers.models.base import PreparedText, Preparer

INPUTS = ("input_ids", "attention_mask")
"""The inputs that every transformer has. Some transformers also have token_type_ids."""
_PARAGRAPH = 4
"""Number of sentences in a medium-length text, which has about 60 tokens.

A whole line is about 170 tokens, and one and a half lines are about 250.
"""

_LIST_WORDS = (8, 12, 20, 40, 60, 90, 120, 150, 180, 180, 180, 200, 200, 200, 200, 200)
_WORD_MARKS = "▁Ġ"
"""The characters that SentencePiece and byte-level BPE use to mark a token that starts a word."""


def calibration_texts() -> list[str]:
    """Returns 160 texts for calibration: short, medium, and long in a ratio of 12 to 3 to 1."""
    return _texts(_subjects()[0::2])


def vocabulary(transformer: Path) -> list[str]:
    """Returns the tokens known to the tokenizer in a model's folder."""
    return list(Tokenizer.from_file(str(transformer / "tokenizer.json")).get_vocab())


def word_lists(tokens: Sequence[str]) -> list[str]:
    """Returns 16 texts of words from a tokenizer's vocabulary: a few short, the rest long.

    The lists are the same every time.

    Without them, MiniLM in static INT8 had a minimum cosine of 0.9845 on such lists. With them, the
    minimum is 0.9876, and the cosine on English text is higher too.
    """
    words = sorted(
        {word for token in tokens if (word := token.strip(_WORD_MARKS)).isalpha() and len(word) > 1}
    )
    draw = random.Random(1)
    return [" ".join(draw.choices(words, k=length)) for length in _LIST_WORDS]


def list_held_out_texts() -> list[str]:
    """Returns 80 texts for evaluation, about different subjects but in the same proportions."""
    return _texts(_subjects()[1::2])[::2]


def prepare_texts(preparer: Preparer, texts: list[str]) -> list[PreparedText]:
    """Returns the texts, in order, truncated and encoded as the worker's preparer does."""
    prepared = preparer.prepare([TextInput(text) for text in texts])
    return [item for item in prepared if isinstance(item, PreparedText)]


def feed_of(text: PreparedText, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns one text as model inputs with these names, int64 [1, tokens] each."""
    ids = np.frombuffer(text.ids, "<u4").astype(np.int64)[None]
    types = (
        np.frombuffer(text.type_ids, "<u4").astype(np.int64)[None]
        if text.type_ids
        else np.zeros_like(ids)
    )
    arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": types}
    return {name: arrays[name] for name in names}


def equal_feeds(
    texts: Sequence[PreparedText], names: Sequence[str], tokens: int
) -> list[dict[str, np.ndarray]]:
    """Concatenates all texts and splits them into inputs of `tokens` tokens each."""
    ids = b"".join(text.ids for text in texts)
    width = 4 * tokens
    pieces = [ids[at : at + width] for at in range(0, len(ids) - width + 1, width)]
    return [feed_of(PreparedText(key="", length=tokens, ids=piece), names) for piece in pieces]


def _subjects() -> list[list[str]]:
    lines = (
        files("workers.optimize").joinpath("english.txt").read_text(encoding="utf-8").splitlines()
    )
    return [re.split(r"(?<=[.?!]) (?=[A-Zg])", line) for line in lines]


def _texts(subjects: list[list[str]]) -> list[str]:
    short = [sentence for subject in subjects for sentence in subject]
    medium = [
        " ".join(subject[at : at + _PARAGRAPH])
        for subject in subjects
        for at in range(0, len(subject) - _PARAGRAPH + 1, _PARAGRAPH)
    ]
    following = [*subjects[1:], subjects[0]]
    long = [
        " ".join(subject + next_subject[: len(next_subject) // 2])
        for subject, next_subject in zip(subjects, following, strict=True)
    ]
    return short + medium + long
