"""The tokenizer: like CLIP's, with one token per word of the captions and bytes for others."""

from __future__ import annotations

import json
import random
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from models.shapes.captions import tell
from models.shapes.world import sample_scene

TOKENS_MAX = 28
"""The longest caption has 25, with its start and end."""
START, END = "<|startoftext|>", "<|endoftext|>"
_CAPTIONS = 20_000
_WORD_END = "</w>"


def make_tokenizer() -> Any:
    """A CLIPTokenizer. Its merges are learned from captions until every word is one token."""
    rng = random.Random(0)
    words = sorted(
        {
            word
            for _ in range(_CAPTIONS)
            for word in tell(sample_scene(rng), rng).replace(",", " ,").split()
        }
    )
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=_WORD_END))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, end_of_word_suffix=_WORD_END, show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [
        *letters,
        *(f"{letter}{_WORD_END}" for letter in letters),
        *("".join(merge) for merge in merges),
    ]
    vocabulary = {
        token: number for number, token in enumerate(dict.fromkeys([*tokens, START, END]))
    }
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TOKENS_MAX)
