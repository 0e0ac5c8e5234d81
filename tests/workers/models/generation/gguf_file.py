"""The tiny Llama from tiny.py as a GGUF file, converted the way llama.cpp's own script would."""

import json
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, context_tokens: int = 8192) -> Path:
    """Writes model.gguf next to the safetensors file in a folder. Returns its path."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.gguf"
    writer = GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder)
    for name, weights in load_file(folder / "model.safetensors").items():
        writer.add_tensor(name_of(name), in_order(name, weights, heads, kv_heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {one["id"] for one in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"]
    tokens = sorted(ids, key=lambda one: int(ids[one]))
    merges = [
        one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL if at in special else TokenType.NORMAL for at in range(len(tokens))]
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def name_of(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, block, inner = name.split(".", 3)
    return f"blk.{block}.{_NAMES[inner.removesuffix('.weight')]}.weight"


def in_order(
    name: str, weights: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", heads: int, kv: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Reorders queries and keys the way llama.cpp rotates them: as neighbors, not halves."""
    count = heads if "q_proj" in name else kv if "k_proj" in name else 0
    if not count:
        return weights
    rows, columns = weights.shape
    parts = weights.reshape(count, 2, rows // count // 2, columns)
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(rows, columns))


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
