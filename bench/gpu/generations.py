"""Tokens/s of a language model on a GPU: transformers' generate compared with our GenerationModel.

The Llama has TinyLlama's shape (1.1 billion parameters) and random weights. Plain transformers gets
all prompts as one batch of equal lengths, which is its best case: nothing joins or leaves.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.gpu.card import DTYPES, seconds
from bench.gpu.scale import Scale
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationResult
from workers.models.base import PreparedPrompt
from workers.models.device import Device
from workers.models.generation.model import GenerationModel

_ENGLISH = Path("workers/optimize/english.txt")
_CONTEXT_TOKENS = 512
_END, _START = "<|end|>", "<|start|>"


def measure(scale: Scale, folder: Path) -> list[dict[str, Any]]:
    """A row for each number of texts in flight: written tokens per second, plain and ours."""
    vocabulary = write_llama(folder, scale)
    precision = "fp32" if scale.device == "cpu" else "bf16"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision])
    plain = plain.to(scale.device).eval()
    device = Device(scale.device, threads=1, memory_fraction=1.0)
    ours = GenerationModel(_entry(folder, precision, max(scale.generations)), folder, device)
    ours.setup()
    ours.warmup()
    rows = []
    for count in scale.generations:
        taken: dict[str, list[float]] = {"plain": [], "ours": []}
        for number in range(1 + scale.rounds):
            ids = _prompts(count, scale.prompt_tokens, vocabulary, seed=100 * count + number)
            works = {
                "plain": lambda ids=ids: _generate(plain, ids, scale),
                "ours": lambda ids=ids: _write(ours, ids, scale),
            }
            for name, work in works.items():
                call_s = seconds(scale.device, work)
                if number:
                    taken[name].append(call_s)
        tokens = count * scale.written_tokens
        rates = {name: tokens / statistics.median(times) for name, times in taken.items()}
        rows.append({"in_flight": count, **rates, "ratio": rates["ours"] / rates["plain"]})
    return rows


def _prompts(count: int, length: int, vocabulary: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, vocabulary, (count, length), dtype=np.uint32)


def _generate(model: Any, ids: np.ndarray, scale: Scale) -> None:
    tokens = torch.as_tensor(ids.astype(np.int64), device=scale.device)
    with torch.inference_mode():
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=scale.written_tokens,
            min_new_tokens=scale.written_tokens,
            do_sample=False,
            pad_token_id=0,
        ).cpu()
    assert written.shape[1] == ids.shape[1] + scale.written_tokens


def _write(model: GenerationModel, ids: np.ndarray, scale: Scale) -> None:
    for slot, row in enumerate(ids):
        prompt = PreparedPrompt(
            key="",
            length=len(row) + scale.written_tokens,
            ids=row.astype("<u4").tobytes(),
            max_tokens=scale.written_tokens,
            seed=1,
            temperature=0.0,
        )
        model.admit(slot, prompt)
    results: dict[int, Any] = {}
    while len(results) < len(ids):
        results |= model.step().results
    for result in results.values():
        assert isinstance(result, GenerationResult), result
        assert result.output_tokens == scale.written_tokens, result


def _entry(folder: Path, precision: str, most: int) -> Model:
    return Model.model_validate(
        {
            "name": "llama-random",
            "task": "text",
            "source": f"local:{folder}",
            "precision": precision,
            "batch": {"max_tokens": most * _CONTEXT_TOKENS, "max_items": most},
            "generation": {
                "context_tokens": _CONTEXT_TOKENS,
                "default_tokens": 64,
                "longest_tokens": 256,
            },
        }
    )


def write_llama(folder: Path, scale: Scale) -> int:
    """Writes the Llama and a tokenizer. Returns the tokens that the tokenizer knows."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=[AddedToken(one, special=True) for one in (_END, _START)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_ENGLISH.read_text(encoding="utf-8").splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": _START, "eos_token": _END}), encoding="utf-8"
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    hidden, inner, layers, heads, groups = (
        (2048, 5632, 22, 32, 4) if scale.is_full_width else (32, 64, 2, 4, 2)
    )
    torch.manual_seed(1)
    with torch.device(scale.device):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32000 if scale.is_full_width else tokenizer.get_vocab_size(),
                hidden_size=hidden,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=groups,
                max_position_embeddings=2048,
                bos_token_id=1,
                eos_token_id=0,
                tie_word_embeddings=False,
            )
        )
    model.to(torch.bfloat16 if scale.is_full_width else torch.float32).save_pretrained(folder)
    # No token ends a text, so all texts are equally long.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    return tokenizer.get_vocab_size()
