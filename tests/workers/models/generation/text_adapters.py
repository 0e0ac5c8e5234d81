"""LoRA adapters with random weights for the tiny Llama in tiny.py, in both engines' formats."""

import json
from pathlib import Path

import torch
from gguf import GGUFWriter
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.workers.models.generation.gguf_file import in_order, name_of

RANK = 4
_PREFIX, _SUFFIX = "base_model.model.", ".weight"


def write_adapter(weights: Path, folder: Path, seed: int) -> Path:
    """Writes an adapter that changes most of the model's greedy tokens, as PEFT saves it."""
    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(weights),
        LoraConfig(
            r=RANK, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]
        ),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.5)
    model.save_pretrained(str(folder))
    return folder


def write_gguf_adapter(weights: Path, adapter: Path, path: Path) -> Path:
    """Converts an adapter the way llama.cpp's own script would."""
    config = json.loads((weights / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32(
        "adapter.lora.alpha",
        json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"],
    )
    for name, values in load_file(adapter / "adapter_model.safetensors").items():
        layer, _, part = name.removeprefix(_PREFIX).removesuffix(_SUFFIX).rpartition(".")
        own = f"{layer}{_SUFFIX}"
        if part == "lora_B":
            values = in_order(own, values, heads, kv_heads)
        writer.add_tensor(f"{name_of(own)}.{part.lower()}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merge_greedily(weights: Path, adapter: Path | None, ids: list[int], tokens: int) -> list[int]:
    """Returns the tokens that transformers generates with the adapter merged into the weights."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=0,
            pad_token_id=0,
        )
    tokens_after: list[int] = out[0, len(ids) :].tolist()
    return tokens_after
