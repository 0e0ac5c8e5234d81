"""Transformer families that compute texts end to end, and some that cannot: all results are
correct.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from workers.models.device import Device
from workers.models.embedding.encoder_torch import TorchEncoder
from workers.models.embedding.model_folder import SentenceFolder

pytestmark = pytest.mark.slow

LENGTHS = np.array([7, 1, 12, 12, 3])
VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}


def config_of(family: str) -> Any:
    match family:
        case "bert":
            return transformers.BertConfig(**SIZES)
        case "roberta":
            return transformers.RobertaConfig(**SIZES, pad_token_id=1)
        case "electra":
            return transformers.ElectraConfig(**SIZES, embedding_size=32)
        case "distilbert":
            return transformers.DistilBertConfig(
                vocab_size=VOCABULARY,
                dim=32,
                n_layers=2,
                n_heads=2,
                hidden_dim=64,
                initializer_range=0.2,
            )
        case "mpnet":
            return transformers.MPNetConfig(**SIZES)
        case _:
            return transformers.ModernBertConfig(
                **SIZES, pad_token_id=0, global_attn_every_n_layers=2
            )


def folder_of(tmp_path: Path, family: str) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformers.AutoModel.from_config(config_of(family)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "precision", "pads"),
    [
        ("bert", "fp32", False),
        ("bert", "bf16", False),
        ("roberta", "fp32", False),
        ("roberta", "bf16", False),
        ("electra", "bf16", False),
        ("distilbert", "bf16", False),
        ("mpnet", "fp32", True),  # adds a bias to its attention
        ("modern", "fp32", True),  # looks only at nearby tokens in some layers
        ("modern", "bf16", True),
    ],
)
def test_batch_gives_what_each_text_gives_alone(
    tmp_path: Path, family: str, precision: str, pads: bool
) -> None:
    folder = folder_of(tmp_path, family)
    encoder = TorchEncoder(
        SentenceFolder(folder, 64, False, "", ("mean",), True), Device("cpu", 1, 1.0), precision
    )
    encoder.open()
    assert encoder.pads == pads
    ids = np.random.default_rng(5).integers(5, VOCABULARY, (len(LENGTHS), int(LENGTHS.max())))
    joined = ids[np.arange(ids.shape[1]) < LENGTHS[:, None]]
    ours = encoder.encode(joined, None, LENGTHS)
    apart = 1e-5 if precision == "fp32" else 0.05
    plain = transformers.AutoModel.from_pretrained(folder).eval()
    for row, length in enumerate(LENGTHS):
        with torch.inference_mode():
            mean = (
                plain(input_ids=torch.from_numpy(ids[row : row + 1, :length]))
                .last_hidden_state[0]
                .mean(0)
                .numpy()
            )
        assert np.abs(ours[row] - mean / np.linalg.norm(mean)).max() < apart
