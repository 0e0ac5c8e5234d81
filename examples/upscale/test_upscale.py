"""Tests the upscaler against ncnn, in tiles, and through a whole pipeline."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples.oracles import loaded, photograph, run_oracle
from examples.show import KEPT
from models.shapes.draw import draw
from models.shapes.judge import read
from models.shapes.score import held_out, matched

pytestmark = pytest.mark.slow(about_s=120)

NCNN = """
import sys
import ncnn
import numpy as np

weights, inputs, target = sys.argv[1:]
net = ncnn.Net()
net.opt.use_vulkan_compute = False
net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
assert net.load_param(f"{weights}/realesrgan-x4plus.param") == 0
assert net.load_model(f"{weights}/realesrgan-x4plus.bin") == 0
extractor = net.create_extractor()
numbers = np.load(inputs)  # a Mat does not keep it
extractor.input("data", ncnn.Mat(numbers).clone())
status, output = extractor.extract("output")
assert status == 0
np.save(target, np.array(output))
"""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return loaded("upscale")


@pytest.fixture(scope="module")
def predictor(module: ModuleType) -> Any:
    predictor = module.Predictor()
    predictor.setup()
    return predictor


def small(side: int = 48) -> Image.Image:
    """Returns part of a photograph, with edges and texture."""
    image = photograph("flower.jpg")
    image.thumbnail((160, 160))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def numbers(image: Image.Image) -> torch.Tensor:
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255).contiguous()


def test_numbers_are_those_of_ncnn(predictor: Any, tmp_path: Path) -> None:
    inputs = numbers(small())
    np.save(tmp_path / "given.npy", inputs.numpy())
    run_oracle(
        "upscale",
        NCNN,
        KEPT / "upscale" / "weights",
        tmp_path / "given.npy",
        tmp_path / "found.npy",
    )
    expected = np.load(tmp_path / "found.npy").clip(0, 1)
    output = predictor.network(inputs[None])[0].numpy()
    assert output.shape == expected.shape == (3, 192, 192)
    # One 8-bit step is 0.004.
    assert np.abs(output - expected).max() < 0.002
    assert output.std() > 0.1, "an image, not a gray area"


def test_tiles_leave_no_seams(
    module: ModuleType, predictor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = numbers(small(80))
    whole = module.enlarge(predictor.network, inputs)
    monkeypatch.setattr(module, "TILE_PX", 40)
    tiled = module.enlarge(predictor.network, inputs)
    difference = (whole - tiled).abs()
    assert difference.mean() < 0.005
    seam = difference[:, :, 158:162].mean()
    assert seam < 3 * difference.mean() + 0.005


def test_shapes_are_recognized_better_than_of_bicubic(module: ModuleType, predictor: Any) -> None:
    """Uses the judge from the shapes world: held-out 64-pixel scenes, reduced to 16 pixels.

    The judge finds 36 of 36 figures in the scenes themselves, 29 after upscaling here, and 21 after
    bicubic resampling (Zen 3 CPU, fp32).
    """
    right = {"enlarged": 0, "bicubic": 0}
    for captioned in held_out(24):
        seen = draw(captioned.scene).resize((16, 16), Image.Resampling.BOX)
        pixels = module.enlarge(predictor.network, numbers(seen)).mul(255).round().to(torch.uint8)
        images = {
            "enlarged": pixels.permute(1, 2, 0).numpy(),
            "bicubic": np.asarray(seen.resize((64, 64), Image.Resampling.BICUBIC)),
        }
        for name, image in images.items():
            for figure, match in matched(captioned.scene.figures, read(image).figures):
                right[name] += (match and (match.shape, match.color)) == (
                    figure.shape,
                    figure.color,
                )
    assert right["enlarged"] >= right["bicubic"] + 4, right


@pytest.mark.parametrize(("scale", "size"), [(4, (128, 96)), (1.5, (48, 36))])
def test_a_transparent_image_stays_transparent(
    predictor: Any, tmp_path: Path, scale: float, size: tuple[int, int]
) -> None:
    image = small().crop((0, 0, 32, 24)).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(tmp_path / "given.png")
    with Image.open(predictor.predict(image=tmp_path / "given.png", scale=scale)) as output:
        assert (output.size, output.mode) == (size, "RGBA")
        alpha = np.asarray(output.getchannel("A"))
    assert alpha.min() < 20
    assert alpha.max() > 235


def test_an_image_that_cant_be_used_is_the_callers_mistake(
    module: ModuleType, predictor: Any, tmp_path: Path
) -> None:
    Image.new("RGB", (2000, 1000)).save(tmp_path / "given.png")
    with pytest.raises(
        module.InvalidInput, match="at most 1048576 pixels, got 2000 x 1000"
    ) as raised:
        predictor.predict(image=tmp_path / "given.png", scale=4)
    assert raised.value.field == "image"
    (tmp_path / "given.png").write_bytes(b"no image")
    with pytest.raises(module.InvalidInput, match="must be a readable PNG") as raised:
        predictor.predict(image=tmp_path / "given.png", scale=4)
    assert raised.value.field == "image"


def test_files_that_are_not_the_weights_are_refused(module: ModuleType) -> None:
    text = (KEPT / "upscale" / "weights" / "realesrgan-x4plus.param").read_text()
    data = (KEPT / "upscale" / "weights" / "realesrgan-x4plus.bin").read_bytes()
    layers = module.read_layers(text)
    with pytest.raises(ValueError, match="4 extra bytes follow the weights"):
        list(module.read_weights(layers, data + b"more"))
    with pytest.raises(ValueError, match="half precision"):
        list(module.read_weights(layers, b"\0" * 8))
    with pytest.raises(ValueError, match=r"not an ncnn \.param file"):
        module.read_layers("1\n2 3\n")
