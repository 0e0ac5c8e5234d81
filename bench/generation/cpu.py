"""The pipeline's CPU time per token of streamed text, at several model speeds.

A token's cost depends on how many arrive at a time, so models of three sizes are measured, with 16
texts in flight. Two of them have random weights and generate nonsense. The third is SmolLM2-135M,
if the `text` extra is installed. The stack is `penstock up`. The CPU time covers the API, the
worker without its model process, and Redis, minus their idle usage.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig

from bench.generation.load import MODEL, SERVED, running_stack, smollm2_folder
from bench.generation.prompts import MixedPrompt, conversations
from bench.generation.served import drive
from bench.pipeline import Parts
from bench.report import Figure, Outcome
from shared.errors import ConfigurationError
from tests.workers.models.generation.gguf_file import write_gguf
from tests.workers.models.generation.tiny import tiny_config, write_folder
from workers.models.generation.vocabulary import Vocabulary

RANDOM: Mapping[str, Mapping[str, str]] = {
    "our engine": {"precision": "fp32"},
    "llama.cpp": {"engine": "llama.cpp"},
}
IN_FLIGHT = 16
TOKENS = 64
MEASURED_S = 15.0
SETTLED_S = 3.0
"""How long to wait after the last text for its rows and leases to be finished."""
IDLE_S = 10.0
API, WORKER = "API", "worker, I/O"
COUNTED = {API: API, WORKER: "worker", "Redis": "Redis"}
CPU_LIMIT_MS = 0.3
"""Maximum CPU time of the API and the worker (not its model process) per token."""
LAST_ID = 399
"""The token that ends a text generated with random weights. If it were a likely token, most texts
would end immediately.
"""
SIZES = {"2 layers of 64": (64, 2), "12 layers of 384": (384, 12)}


def run() -> Outcome:
    figures: list[Figure] = []
    details = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, (width, layers) in SIZES.items():
            folder = Path(temporary, f"{width}")
            folder.mkdir()
            write_folder(folder, _config(width, layers))
            _silence_bytes(folder)
            ending = json.dumps({"eos_token_id": [LAST_ID]})
            (folder / "generation_config.json").write_text(ending)
            write_gguf(folder)
            for engine, changes in RANDOM.items():
                figures += _measured(f"random, {name}, {engine}", folder, changes)
    try:
        folder = smollm2_folder()
    except ConfigurationError as error:
        details["SmolLM2-135M"] = f"not measured: {error.message}"
    else:
        for engine, changes in SERVED.items():
            figures += _measured(f"SmolLM2-135M {engine}", folder, changes)
    return Outcome(figures, details)


def _config(width: int, layers: int) -> LlamaConfig:
    config = tiny_config(LAST_ID + 1)
    config.update(
        {
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "head_dim": width // 4,
            "max_position_embeddings": 2048,
            "eos_token_id": LAST_ID,
        }
    )
    return config


def _silence_bytes(folder: Path) -> None:
    """Makes the model generate only whole characters, as a model with real weights would.

    The token with the largest logit is generated. A silenced token's logit is 0.
    """
    vocabulary = Vocabulary(folder)
    weights = load_file(folder / "model.safetensors")
    for token in range(vocabulary.size):
        data = vocabulary.token_bytes(token)
        if not data or not data.isascii():
            weights["lm_head.weight"][token] = 0.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _measured(name: str, folder: Path, changes: Mapping[str, str]) -> Iterator[Figure]:
    with running_stack(folder, changes) as stack:
        drive(stack.api_url, MODEL, _prompts(IN_FLIGHT, 0), IN_FLIGHT)
        parts = Parts(stack)
        time.sleep(SETTLED_S)
        _, idle = parts.spend(lambda: time.sleep(IDLE_S))
        began_s = time.monotonic()

        def ask() -> int:
            tokens = first = 0
            while time.monotonic() - began_s < MEASURED_S:
                first += 4 * IN_FLIGHT
                texts = drive(stack.api_url, MODEL, _prompts(4 * IN_FLIGHT, first), IN_FLIGHT)
                tokens += sum(text.tokens for text in texts)
            return tokens

        tokens, busy = parts.spend(ask)
        wall_s = time.monotonic() - began_s
    yield Figure(f"{name}, speed", tokens / wall_s, "tokens/s")
    for part, label in COUNTED.items():
        yield Figure(f"{name}, {label}", 1000 * busy[part] / tokens, "ms/token")
    own_ms = 1000 * (busy[API] + busy[WORKER]) / tokens
    limit = ("<=", CPU_LIMIT_MS) if "SmolLM2" in name else ()
    yield Figure(f"{name}, API and worker", own_ms, "ms/token", *limit)
    asked_s = busy[API] + busy[WORKER] - (idle[API] + idle[WORKER]) * wall_s / IDLE_S
    yield Figure(f"{name}, the same above idle", 1000 * asked_s / tokens, "ms/token")


def _prompts(count: int, first: int) -> list[MixedPrompt]:
    return [MixedPrompt(conversation, TOKENS) for conversation in conversations(count, first=first)]
