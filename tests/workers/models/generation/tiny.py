"""A tiny Llama with random weights, a byte-level tokenizer and a chat template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

from shared.models.catalog import Model
from workers.models.base import PreparedPrompt, StepEnd, SteppedModel
from workers.models.device import Device
from workers.models.generation.model import GenerationModel
from workers.models.generation.vocabulary import Vocabulary

END, START, TURN = "<|end|>", "<|start|>", "<|turn|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message.role }}\n"
    "{{ message.content }}<|end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 160
Generate = Callable[..., tuple[list[int], torch.Tensor]]
"""Maps a prompt, a number, and options to greedy tokens and the log probabilities of each step."""


def write_folder(folder: Path, config: LlamaConfig | None = None) -> Path:
    """Writes a folder in the format of the Hugging Face Hub."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(one, special=True) for one in (END, START, TURN)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path("workers/optimize/english.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines()[:300], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": START, "eos_token": END})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config or tiny_config(tokenizer.get_vocab_size()))
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    return folder


def tiny_config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        # Large weights, so that likelihoods differ and greedy choices are never ties.
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


def entry(**changes: object) -> Model:
    fields = {
        "name": "tiny-text",
        "task": "text",
        "source": "local:unused",
        "precision": "fp32",
        "batch": {"max_tokens": 640, "max_items": 5},
        "generation": {
            "context_tokens": CONTEXT_TOKENS,
            "default_tokens": 16,
            "longest_tokens": 100,
            "chunk_tokens": 16,
        },
    }
    return Model.model_validate(fields | changes)


def open_model(folder: Path, lookup_tokens: int = 0, **changes: object) -> GenerationModel:
    generation = entry().generation.model_copy(update={"lookup_tokens": lookup_tokens})
    changed = entry(**{"generation": generation} | changes)
    model = GenerationModel(changed, folder, Device("cpu", 1, 1.0))
    model.setup()
    return model


def prompt(ids: list[int], max_tokens: int = 12, **fields: object) -> PreparedPrompt:
    given = {"seed": 3, "temperature": 0.0} | fields
    return PreparedPrompt(
        key="",
        length=len(ids) + max_tokens,
        ids=packed(ids),
        max_tokens=max_tokens,
        **given,  # type: ignore[arg-type]
    )


def packed(ids: list[int]) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in ids)


def run(model: SteppedModel, *items: PreparedPrompt) -> list[Any]:
    """Returns the outcomes of items that are admitted together."""
    for slot, item in enumerate(items):
        model.admit(slot, item)
    return finish(model, len(items))


def interrupted(model: Any, item: PreparedPrompt, after_steps: int) -> Any:
    """Returns the outcome of an item that is interrupted after this many steps and then admitted
    again.
    """
    model.admit(0, item)
    told = []
    for _ in range(after_steps):
        assert not model.step().results
        told += model.take_chunks().values()
    told += [chunk] if (chunk := model.interrupt(0)) is not None else []
    ids = [token for chunk in told for token in chunk.ids]
    assert ids, "it has written nothing"
    later = replace(
        item,
        written_ids=packed(ids),
        written_text="".join(chunk.text for chunk in told),
        written_cached_tokens=told[0].cached_tokens,
    )
    return run(model, later)[0]


def finish(model: SteppedModel, items: int) -> list[Any]:
    found: dict[int, Any] = {}
    for _ in range(2000):
        if len(found) == items:
            break
        end: StepEnd = model.step()
        found |= end.results
    return [found[slot] for slot in sorted(found)]


def text_of(folder: Path, ids: list[int]) -> str:
    return b"".join(map(Vocabulary(folder).token_bytes, ids)).decode(errors="replace")


def ids_of(folder: Path, text: str) -> list[int]:
    return Vocabulary(folder).tokenizer.encode(text, add_special_tokens=False).ids
