"""Training runs that start from the shipped pipeline: a few steps, and the file they write."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from examples.lora import train
from models.shapes.draw import draw
from models.shapes.judge import is_ink
from models.shapes.world import sample_scene

pytestmark = pytest.mark.slow


def test_ink_is_what_is_black_on_white() -> None:
    rng = random.Random(3)
    scenes = [train.inked(sample_scene(rng)) for _ in range(50)]
    assert all(is_ink(np.asarray(draw(scene))) for scene in scenes)
    for scene in scenes:
        colored = replace(
            scene, figures=(replace(scene.figures[0], color="red"), *scene.figures[1:])
        )
        assert not is_ink(np.asarray(draw(colored)))
        assert not is_ink(np.asarray(draw(replace(scene, background="gray"))))
    assert not is_ink(np.full((64, 64, 3), 250, np.uint8))


def test_training_writes_an_adapter_for_the_linear_layers(tmp_path: Path) -> None:
    quick = ["--steps", "2", "--batch", "2", "--rank", "4", "--scored", "1"]
    assert train.main([str(tmp_path), *quick]) == 0
    tensors = load_file(tmp_path / train.FILE)
    downs = {name for name in tensors if name.endswith(".lora_A.weight")}
    assert len(tensors) == 2 * len(downs)
    assert all(name.startswith("unet.") and len(tensors[name]) == 4 for name in downs)
    assert all(any(f".{layer}." in name for name in downs) for layer in train.LAYERS)
    assert any(tensors[name.replace("lora_A", "lora_B")].abs().max() > 0 for name in downs)
