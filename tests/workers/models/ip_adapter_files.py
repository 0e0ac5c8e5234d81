"""IP-Adapters with random weights for a pipeline, in the format of published files."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.embeddings import IPAdapterPlusImageProjection
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

WEIGHT_NAME = "ip-adapter.safetensors"
SIDE_PX = 32
_SEEN, _HIDDEN = 24, 32
_PLUS = (
    (r"^layers\.(\d)\.ln0\.", r"layers.\1.0.norm1."),
    (r"^layers\.(\d)\.ln1\.", r"layers.\1.0.norm2."),
    (r"^layers\.(\d)\.attn\.to_out\.0\.", r"layers.\1.0.to_out."),
    (r"^layers\.(\d)\.attn\.", r"layers.\1.0."),
    (r"^layers\.(\d)\.ff\.0\.", r"layers.\1.1.0."),
    (r"^layers\.(\d)\.ff\.1\.net\.0\.proj\.", r"layers.\1.1.1."),
    (r"^layers\.(\d)\.ff\.1\.net\.2\.", r"layers.\1.1.3."),
)
"""Names of IP-Adapter Plus's parts, in files and in diffusers."""

Tensors = dict[str, torch.Tensor]


def write(folder: Path, pipeline: Path, seed: int, *, is_plus: bool = False) -> Path:
    """Writes the file and its image encoder under `folder`. Returns the folder."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    _encoder().save_pretrained(folder / "image_encoder")
    save_file(tensors_for(pipeline, seed, is_plus=is_plus), folder / WEIGHT_NAME)
    return folder


def tensors_for(pipeline: Path, seed: int, *, is_plus: bool = False) -> Tensors:
    """The tensors for a file that changes the pipeline's images a lot."""
    torch.manual_seed(seed)
    unet: Any = UNet2DConditionModel.from_pretrained(pipeline / "unet")
    width = unet.config.cross_attention_dim
    projection = _plus(width) if is_plus else _plain(width)
    tensors = {f"image_proj.{name}": one for name, one in projection.items()}
    layers = [
        unet.get_submodule(name.removesuffix(".processor"))
        for name in unet.attn_processors
        if "attn2" in name
    ]
    for number, layer in enumerate(layers):
        for kind in ("to_k_ip", "to_v_ip"):
            weight = torch.randn(layer.inner_dim, width) * (3 / width**0.5)
            tensors[f"ip_adapter.{2 * number + 1}.{kind}.weight"] = weight
    return tensors


def digest_of(file: Path) -> str:
    return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"


def resized(folder: Path, side_px: int) -> Path:
    """Changes the image size in the image encoder's config. Returns the same folder."""
    config = folder / "image_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"image_size": side_px}))
    return folder


def _encoder() -> CLIPVisionModelWithProjection:
    encoder = CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=_HIDDEN,
            intermediate_size=2 * _HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=SIDE_PX,
            patch_size=8,
            projection_dim=_SEEN,
        )
    )
    # The usual weights are so small that all images look the same.
    for one in encoder.parameters():
        if one.ndim > 1:
            torch.nn.init.normal_(one, std=one[0].numel() ** -0.5)
    return encoder


def _plain(width: int) -> Tensors:
    return {
        "proj.weight": torch.randn(4 * width, _SEEN),
        "proj.bias": torch.randn(4 * width) * 0.1,
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }


def _plus(width: int) -> Tensors:
    """IP-Adapter Plus tensors, with 4 layers and heads of size 64."""
    made = IPAdapterPlusImageProjection(_HIDDEN, width, 32, 4, 64, 1, 6, 4).state_dict()
    written: Tensors = {}
    for name, one in made.items():
        for ours, theirs in _PLUS:
            if re.match(ours, name):
                name = re.sub(ours, theirs, name)
                break
        written[name] = one.contiguous()
    for name in [one for one in written if one.endswith(".0.to_k.weight")]:
        both = written.pop(name), written.pop(name.replace("to_k", "to_v"))
        written[name.replace("to_k", "to_kv")] = torch.cat(both)
    return written
