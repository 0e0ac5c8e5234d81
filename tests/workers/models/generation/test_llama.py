"""Llama's forward pass, implemented with few operators and compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.workers.models.generation import tiny
from workers.models.generation.decoder import fuse_linear_layers, is_llama, round_linear_layers
from workers.models.generation.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

IDS = list(range(5, 45))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(**changes: Any) -> LlamaConfig:
    return LlamaConfig.from_dict(tiny.tiny_config(400).to_dict() | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": YARN},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_llamas_compute_as_generate_does(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, _config(**changes))
    plain = _load(tmp_path)
    for name, weights in plain.named_parameters():
        if name.endswith("bias"):  # zeros by default
            torch.nn.init.normal_(weights, std=0.5)
    plain.save_pretrained(tmp_path)
    wanted = plain.generate(torch.tensor([IDS]), max_new_tokens=20, do_sample=False)
    model = tiny.open_model(tmp_path)
    # The text is first run on its own, with one row per step, and then in a batch.
    alone = tiny.run(model, tiny.prompt(IDS, 20))[0]
    company, _ = tiny.run(model, tiny.prompt(IDS, 20), tiny.prompt(IDS[3:], 20))
    text = Vocabulary(tmp_path).tokenizer.decode(wanted[0, len(IDS) :].tolist())
    assert [alone.text, company.text] == [text, text]


@pytest.mark.parametrize("rounds", [False, True], ids=["fp32", "int4"])
def test_joined_layers_are_the_same_numbers_in_the_same_memory(folder: Path, rounds: bool) -> None:
    apart, joined = _load(folder), _load(folder)
    fuse_linear_layers(joined)
    if rounds:
        round_linear_layers(apart)
        round_linear_layers(joined)
    given = torch.tensor([IDS])
    with torch.inference_mode():
        right, found = apart(given).logits, joined(given).logits
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    assert _bytes(joined) == _bytes(apart)


def test_models_that_only_resemble_a_llama_are_none(folder: Path) -> None:
    class Other(type(_load(folder))):  # type: ignore[misc]
        """May compute anything."""

    assert is_llama(_load(folder))
    assert not is_llama(Other(_config()))


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _bytes(model: torch.nn.Module) -> int:
    """Total size in bytes of all the tensors that its modules hold, as parameters or otherwise.

    A shared tensor counts once.
    """
    held = {
        id(tensor): tensor.nbytes
        for module in model.modules()
        for tensor in (*module.parameters(False), *vars(module).values())
        if isinstance(tensor, torch.Tensor)
    }
    return sum(held.values())
