"""Text models with 4-bit weights, compared with weights that the test rounds itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.errors import ConfigurationError
from tests.workers.models.generation import tiny
from workers.models.generation.decoder import round_linear_layers
from workers.models.generation.model import GenerationModel

pytestmark = pytest.mark.slow

GROUP = 32
IDS = list(range(5, 45))


class _OneLayer(torch.nn.Module):
    """A hidden layer and an output layer."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.layer.weight.data = torch.from_numpy(weight).float()
        if bias is not None:
            self.layer.bias.data = torch.from_numpy(bias).float()
        self.requires_grad_(False)

    def get_output_embeddings(self) -> None:
        return None


def _on_a_grid(rows: int, width: int, seed: int) -> np.ndarray:
    """Weights as in a Q4_1 GGUF file: integers from 0 to 15, times a scale, plus an offset."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 16, (rows, width // GROUP, GROUP))
    numbers[..., 0], numbers[..., 1] = 0, 15
    scales = np.float16(random.uniform(0.001, 0.1, (rows, width // GROUP, 1)))
    return (numbers * scales - 7 * scales).reshape(rows, width).astype(np.float64)


def _rounded(weight: np.ndarray) -> np.ndarray:
    """The nearest of 16 values between each group's minimum and maximum."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = (high - low) / 15
    nearest: np.ndarray = low + np.round((groups - low) / step) * step
    return nearest.reshape(weight.shape)


def _error(found: torch.Tensor, right: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - right) / np.linalg.norm(right))


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_4_bits_stay_as_they_are(rows: int, dtype: torch.dtype) -> None:
    weight = _on_a_grid(48, 96, seed=1)
    bias = np.random.default_rng(2).normal(size=48)
    model = _OneLayer(weight, bias)
    round_linear_layers(model)
    given = np.random.default_rng(3).normal(size=(2, rows, 96))
    found = model.layer(torch.from_numpy(given).to(dtype))
    assert (found.dtype, found.shape) == (dtype, (2, rows, 48))
    assert _error(found, given @ weight.T + bias) < 0.01


def test_other_weights_become_the_nearest_that_4_bits_can_say() -> None:
    weight = np.random.default_rng(4).normal(size=(32, 128))
    model = _OneLayer(weight)
    round_linear_layers(model)
    given = np.random.default_rng(5).normal(size=(4, 128))
    found = model.layer(torch.from_numpy(given).float())
    assert _error(found, given @ _rounded(weight).T) < 0.01
    assert _error(found, given @ weight.T) > 0.03


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_groups_of_equal_weights_are_no_problem(value: float) -> None:
    model = _OneLayer(np.full((16, 64), value))
    round_linear_layers(model)
    assert model.layer(torch.ones(1, 64)).tolist() == [[64 * value] * 16]


@pytest.fixture(scope="module")
def rounded(folder: Path) -> GenerationModel:
    return tiny.open_model(folder, precision="int4")


def test_a_text_is_that_of_rounded_weights(rounded: GenerationModel, folder: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, layer in plain.model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            nearest = _rounded(layer.weight.detach().double().numpy())
            layer.weight.data = torch.from_numpy(nearest).float()
            assert name.endswith("proj")
    with torch.inference_mode():
        right = plain(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)
    (found,) = tiny.run(rounded, tiny.prompt(IDS, 1, logprobs=5))
    told = [one.logprob for one in found.logprobs[0].top]
    assert told == pytest.approx(right.topk(5).values.tolist(), abs=0.15)
    (again,) = tiny.run(rounded, tiny.prompt(IDS, 1, logprobs=5))
    assert [one.logprob for one in again.logprobs[0].top] == told


def test_company_and_order_change_only_rounding(rounded: GenerationModel) -> None:
    prompts = [tiny.prompt(IDS[: 8 + 5 * n], 1, logprobs=1) for n in range(5)]
    alone = [tiny.run(rounded, prompt)[0].logprobs[0].logprob for prompt in prompts]
    together = [text.logprobs[0].logprob for text in tiny.run(rounded, *prompts)]
    assert together == pytest.approx(alone, abs=0.1)
    reversed_order = [text.logprobs[0].logprob for text in tiny.run(rounded, *prompts[::-1])]
    assert reversed_order[::-1] == pytest.approx(alone, abs=0.1)


def test_a_model_without_such_groups_is_refused(tmp_path: Path) -> None:
    config = tiny.tiny_config(400)
    config.update({"hidden_size": 24, "intermediate_size": 40, "head_dim": 6})
    tiny.write_folder(tmp_path, config)
    with pytest.raises(ConfigurationError, match="precision int4: LlamaForCausalLM has no layers"):
        tiny.open_model(tmp_path, precision="int4")
