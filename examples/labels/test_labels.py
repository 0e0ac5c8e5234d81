"""Checks labels and embeddings against another implementation of the network, and across images."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from examples.oracles import loaded, photograph, run_oracle
from examples.show import KEPT

pytestmark = pytest.mark.slow(about_s=20)

OTHER = """
import sys
import numpy as np
import torch
from efficientnet_lite_pytorch import EfficientNet

weights, inputs, output = sys.argv[1:]
network = EfficientNet.from_name("efficientnet-lite0").eval()
network.load_state_dict(torch.load(weights, weights_only=True))
with torch.inference_mode():
    x = torch.from_numpy(np.load(inputs))
    features = network.extract_features(x).mean((2, 3))
    np.savez(output, logits=network(x).numpy(), features=features.numpy())
"""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return loaded("labels")


@pytest.fixture(scope="module")
def predictor(module: ModuleType) -> Any:
    predictor = module.Predictor()
    predictor.setup()
    return predictor


def saved(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def test_numbers_are_those_of_another_implementation(
    module: ModuleType, predictor: Any, tmp_path: Path
) -> None:
    images = [photograph("flower.jpg"), photograph("china.jpg")]
    inputs = torch.cat([module.prepared(image) for image in images])
    np.save(tmp_path / "given.npy", inputs.numpy())
    weights = KEPT / "labels" / "weights" / "efficientnet-lite0-57934424.pth"
    run_oracle("labels", OTHER, weights, tmp_path / "given.npy", tmp_path / "found.npz")
    expected = np.load(tmp_path / "found.npz")
    with torch.inference_mode():
        logits, features = predictor.network(inputs)
    np.testing.assert_allclose(logits.numpy(), expected["logits"], atol=1e-3)
    np.testing.assert_allclose(features.numpy(), expected["features"], atol=1e-3)


@pytest.mark.parametrize(("name", "label"), [("flower.jpg", "daisy"), ("china.jpg", "palace")])
def test_an_image_has_its_label(predictor: Any, tmp_path: Path, name: str, label: str) -> None:
    path = saved(photograph(name), tmp_path / "given.png")
    output = predictor.predict(image=path, top=3, embed=False)
    assert output.labels[0] == label
    assert output.scores == sorted(output.scores, reverse=True)
    assert 0.2 < output.scores[0] <= 1
    assert (len(output.labels), output.embedding) == (3, None)


def test_images_that_look_alike_are_close(predictor: Any, tmp_path: Path) -> None:
    flower = photograph("flower.jpg")
    images = [flower, ImageOps.mirror(flower), photograph("china.jpg")]
    first, mirrored, other = (
        np.array(
            predictor.predict(
                image=saved(image, tmp_path / f"{number}.png"), top=1, embed=True
            ).embedding
        )
        for number, image in enumerate(images)
    )
    assert first.shape == (1280,)
    assert np.linalg.norm(first) == pytest.approx(1)
    assert first @ mirrored > 0.8
    assert first @ other < 0.4


def test_a_file_that_cant_be_read_is_the_callers_mistake(
    module: ModuleType, predictor: Any, tmp_path: Path
) -> None:
    whole = saved(Image.new("RGB", (64, 64), "red"), tmp_path / "whole.png").read_bytes()
    for number, data in enumerate([b"", b"no image", whole[:60], b"GIF89a" + bytes(20)]):
        (tmp_path / f"{number}.png").write_bytes(data)
        with pytest.raises(module.InvalidInput, match="must be a readable PNG") as refused:
            predictor.predict(image=tmp_path / f"{number}.png", top=1, embed=False)
        assert refused.value.field == "image"
