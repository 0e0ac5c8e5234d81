"""Peers that compute the same model: transformers itself, and llama.cpp in its own Python."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from workers.models.base import PreparedPrompt
from workers.models.device import DTYPES

CONTINUOUS_LIMIT_S = 120.0
LLAMA_LIMIT_S = 120.0
_LLAMA = """
import json, sys, time
from llama_cpp import Llama
path, tokens, threads, conversations = json.load(sys.stdin)
model = Llama(path, n_ctx=512, n_threads=threads, verbose=False)
model.create_chat_completion(conversations[0], max_tokens=2, temperature=0)
began_s, written = time.perf_counter(), 0
for one in conversations:
    done = model.create_chat_completion(one, max_tokens=tokens, temperature=0)
    written += done["usage"]["completion_tokens"]
print(written / (time.perf_counter() - began_s))
"""


class PlainTransformers:
    """The model of transformers without code of ours.

    Args:
        precision: fp32, bf16 or fp16.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[precision], local_files_only=True
        ).eval()

    def one_by_one(self, prompts: Sequence[PreparedPrompt], tokens: int) -> float:
        """Tokens per second of generate(), greedy."""
        written, began_s = 0, time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([_ids(prompt)])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
            )
            written += out.shape[1] - ids.shape[1]
        return written / (time.perf_counter() - began_s)

    def continuous(self, prompts: Sequence[PreparedPrompt], tokens: int) -> float:
        """Tokens per second of its continuous batching, from the first request to the last answer.

        0: it took longer than the limit.
        """
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=2, pad_token_id=2
        )
        batching = self._model.init_continuous_batching(generation_config=config)
        batching.start()
        began_s, written, done = time.perf_counter(), 0, 0
        try:
            for prompt in prompts:
                batching.add_request(_ids(prompt), max_new_tokens=tokens)
            while done < len(prompts):
                if time.perf_counter() - began_s > CONTINUOUS_LIMIT_S:
                    return 0.0
                result = batching.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done += 1
                    written += len(result.generated_tokens)
            return written / (time.perf_counter() - began_s)
        finally:
            batching.stop(block=True, timeout=5)


def llama_cpp(python: str, source: str, conversations: Sequence[Any], tokens: int) -> float | str:
    """Tokens per second of llama-cpp-python, one text after another, or why it failed."""
    package, _, name = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None, "the source was resolved"
    path = Path(next(iter(spec.submodule_search_locations or []))) / name
    order = json.dumps([str(path), tokens, len(os.sched_getaffinity(0)), list(conversations)])
    try:
        done = subprocess.run(
            [python, "-c", _LLAMA],
            input=order,
            capture_output=True,
            text=True,
            check=True,
            timeout=LLAMA_LIMIT_S,
        )
        return float(done.stdout.split()[-1])
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or ["it failed"])[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return str(error)


def _ids(prompt: PreparedPrompt) -> list[int]:
    ids: list[int] = np.frombuffer(prompt.ids, "<u4").tolist()
    return ids
