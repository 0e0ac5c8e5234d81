"""A text of 300 pages in windows through the whole stack, and by sentence-transformers directly.

The text is of Python itself: its reference, and docstrings of its standard library, 500 words to a
page. The stack gets it in one request with `chunk`; sentence-transformers gets its windows in
batches, in a process of its own with a thread for each core. CPU seconds are compared, because the
machine has other load.

BENCH_PAGES: another length.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import pydoc_data.topics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from bench.pipeline import MODEL, MODELS_FILE, Pipeline, running
from bench.report import Figure, Outcome
from shared.catalog_file import read_catalog

PAGES = int(os.environ.get("BENCH_PAGES", "300"))
PAGE_WORDS = 500
BATCH = 32
"""Windows in a batch of sentence-transformers: its default."""
LIMIT_S = 1800.0
ROWS_LIMIT_S = 60.0
MIN_COSINE = 0.9999
MAX_RATIO = 1.1
NEAR_USD = 1e-9


def run() -> Outcome:
    """Compares vectors, tokens, prices and CPU seconds."""
    text = python_text(PAGES * PAGE_WORDS)
    patience = {"deadline": {"default_s": LIMIT_S, "longest_s": LIMIT_S}}
    with running(patience, is_alone=True) as pipeline, tempfile.TemporaryDirectory() as folder:
        first, again = _ask(pipeline, text), _ask(pipeline, text)
        windows = [one["window"] for one in first["reply"]["data"]]
        rows = pipeline.usage_rows(
            ["tokens", "cost_usd"], {first["id"]}, ROWS_LIMIT_S, len(windows)
        )
        backend = pipeline.backend()
        parts = [text[one["start"] : one["end"]] for one in windows]
        direct, expected = _direct(pipeline.model_folder, parts, Path(folder))
    cosines = (vectors_of(first["reply"]) * expected).sum(axis=1)
    failures = list(_failures(first, again, rows, direct))
    failures += _price_failures(first, rows, direct)
    replies = [one.pop("reply") for one in (first, again)]
    details = {"stack": first, "again": again, "direct": direct, "characters": len(text)}
    details |= {"backend": backend.backend, "precision": backend.precision}
    details["load_after"] = round(os.getloadavg()[0], 2)
    figures = [
        Figure(f"pages of {PAGE_WORDS} words", PAGES, ""),
        Figure("windows", len(windows), ""),
        Figure("tokens", replies[0]["usage"]["total_tokens"], ""),
        Figure("price of 1,000 such texts", first["cost_usd"] * 1000, "USD"),
        Figure("lowest cosine", float(cosines.min()), "", ">=", MIN_COSINE),
        *_times(first, again, direct),
    ]
    return Outcome(figures, details, "; ".join(failures))


def python_text(words: int) -> str:
    """Returns a text of so many words, the same with each Python of a version.

    Raises:
        ValueError: this Python has fewer.
    """
    parts, left = list[str](), words
    for part in _parts():
        count = len(part.split())
        if count >= left:
            # Whitespace between words stays as it is.
            lines = part.splitlines(keepends=True)
            while len("".join(lines).split()) > left:
                lines.pop()
            return "\n\n".join([*parts, "".join(lines)])
        parts.append(part)
        left -= count
    raise ValueError(f"{words} words were asked for, {left} are missing")


def _parts() -> Iterator[str]:
    """Yields the topics of Python's reference, then the docstrings of its library, by name."""
    topics = pydoc_data.topics.topics
    yield from (topics[name] for name in sorted(topics))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _ask(pipeline: Pipeline, text: str) -> dict[str, Any]:
    """Sends a text. Returns the answer, its id, price, clock and CPU seconds of the whole stack."""
    body = {"model": MODEL, "input": text, "encoding_format": "base64", "chunk": {}}
    before_s, began_s = sum(pipeline.cpu_s().values()), time.monotonic()
    url = f"{pipeline.stack.api_url}/v1/embeddings"
    response = httpx.post(url, json=body, timeout=LIMIT_S)
    wall_s = time.monotonic() - began_s
    if response.is_error:
        raise RuntimeError(f"{response.status_code}: {response.text[:500]}")
    return {
        "reply": response.json(),
        "id": response.headers["x-request-id"],
        "cost_usd": float(response.headers["x-penstock-cost-usd"]),
        "cache": response.headers["x-penstock-cache"],
        "wall_s": wall_s,
        "cpu_s": sum(pipeline.cpu_s().values()) - before_s,
    }


def vectors_of(reply: dict[str, Any]) -> NDArray[np.float32]:
    """The vectors of an answer in base64, [windows, dimensions]."""
    decoded = (base64.b64decode(one["embedding"]) for one in reply["data"])
    return np.stack([np.frombuffer(one, "<f4") for one in decoded])


def _direct(
    model: Path, texts: list[str], folder: Path
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """What sentence-transformers took in a process of its own, without its start, and vectors."""
    texts_file, vectors_file = folder / "windows.json", folder / "vectors.npy"
    texts_file.write_text(json.dumps(texts))
    words = [sys.executable, "-m", "bench.long_texts", str(model), str(texts_file)]
    done = subprocess.run([*words, str(vectors_file)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout), np.load(vectors_file)


def _encode(model_folder: str, texts_file: str, vectors_file: str) -> None:
    """The child: embeds texts, keeps their vectors, and prints tokens and seconds."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = SentenceTransformer(model_folder, device="cpu")
    texts = json.loads(Path(texts_file).read_text())
    model.encode(texts[:BATCH], show_progress_bar=False)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    vectors = model.encode(texts, batch_size=BATCH, show_progress_bar=False)
    took = {"wall_s": time.monotonic() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    np.save(vectors_file, vectors)
    ids_of_all = model.tokenizer(texts)["input_ids"]
    tokens = {text: len(ids) for text, ids in zip(texts, ids_of_all, strict=True)}
    counted = {"tokens": sum(tokens[text] for text in texts)}
    counted["different_tokens"] = sum(tokens.values())
    print(json.dumps(took | counted))


def _failures(
    first: dict[str, Any],
    again: dict[str, Any],
    rows: list[dict[str, Any]],
    direct: dict[str, Any],
) -> Iterator[str]:
    """Yields what is wrong with tokens, rows and the repeated request."""
    reply = first["reply"]
    tokens = {
        "usage": reply["usage"]["total_tokens"],
        "windows": sum(one["window"]["tokens"] for one in reply["data"]),
        "rows": sum(row["tokens"] for row in rows),
        "sentence-transformers": direct["tokens"],
    }
    if len(set(tokens.values())) > 1:
        yield f"tokens differ: {tokens}"
    if len(rows) != len(reply["data"]):
        yield f"{len(rows)} rows of {len(reply['data'])} windows"
    if again["cost_usd"] or again["reply"]["data"] != reply["data"]:
        yield "the same text again was computed, or has other vectors"


def _price_failures(
    first: dict[str, Any], rows: list[dict[str, Any]], direct: dict[str, Any]
) -> Iterator[str]:
    """Yields what is wrong with prices. Windows that are equal are computed and charged once."""
    price = read_catalog(MODELS_FILE).find(MODEL).price
    usd = {
        "answer": first["cost_usd"],
        "rows": sum(float(row["cost_usd"] or 0) for row in rows),
        "tokens": direct["different_tokens"] * price.per_million_tokens_usd / 1e6,
    }
    if max(usd.values()) - min(usd.values()) > NEAR_USD:
        yield f"prices differ: {usd}"


def _times(
    first: dict[str, Any], again: dict[str, Any], direct: dict[str, Any]
) -> Iterator[Figure]:
    """Yields clock and CPU seconds, of the whole stack and directly, and their ratios."""
    took = {"stack": first, "stack, the same text again": again, "sentence-transformers": direct}
    for name, one in took.items():
        yield Figure(f"clock, {name}", one["wall_s"], "s")
        yield Figure(f"CPU, {name}", one["cpu_s"], "s")
    name = "stack over sentence-transformers"
    yield Figure(f"clock, {name}", first["wall_s"] / direct["wall_s"], "")
    yield Figure(f"CPU, {name}", first["cpu_s"] / direct["cpu_s"], "", "<=", MAX_RATIO)


if __name__ == "__main__":
    _encode(*sys.argv[1:])
