"""A text's reference vector: torch in fp32, one text at a time, without padding."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

LONGEST = 256
"""Maximum number of tokens allowed by MiniLM's sentence_bert_config.json."""


def vectors_of(texts: Iterable[str], model_folder: Path) -> dict[str, np.ndarray]:
    """Returns each text's unit vector (float32 [384]): the normalized mean over its tokens."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    vectors: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        for text in texts:
            tokens = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
            mean = model(**tokens).last_hidden_state[0].mean(0)
            vectors[text] = torch.nn.functional.normalize(mean, dim=0).numpy()
    return vectors


def cosine(vector: list[float], reference: np.ndarray) -> float:
    """Returns the cosine similarity between a vector of any length and a unit vector."""
    array = np.asarray(vector, np.float64)
    return float(array @ reference / np.linalg.norm(array))
