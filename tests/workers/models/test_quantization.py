"""INT8 images, if torchao is installed: `pip install penstock[gpu]`.

No other extra includes it; see pyproject.toml.
"""

import importlib.util
import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from shared.models.catalog import Catalog
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.batches import model_for
from workers.models.base import InferenceModel, Preparer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
    ),
    # torchao loads GPU kernels and warns if the machine has no GPU.
    pytest.mark.filterwarnings("default"),
]

TEXT = ImageInput(
    prompt="a mill by the river",
    width=64,
    height=64,
    steps=6,
    guidance_scale=7.5,
    seed=1,
    scheduler="ddim",
)
TOLERANCE_PSNR_DB = 40.0


@pytest.fixture
def int8(catalog: Catalog, tiny_folder: Path) -> InferenceModel:
    model = model_for(
        catalog.default("image").model_copy(update={"precision": "int8"}), tiny_folder, "cpu"
    )
    model.setup()
    return model


def drawn(model: InferenceModel, preparer: Preparer, seeds: list[int]) -> np.ndarray:
    """[seeds, height, width, 3] levels from 0 to 255."""
    batch = preparer.prepare([msgspec.structs.replace(TEXT, seed=seed) for seed in seeds])
    images = []
    for result in model.predict(batch, lambda step, steps: None):  # type: ignore[arg-type]
        assert isinstance(result, ImageResult)
        with Image.open(io.BytesIO(result.image.data or b"")) as image:
            images.append(np.asarray(image).astype(float))
    return np.stack(images)


def test_int8_draws_nearly_the_same(
    tiny: InferenceModel, int8: InferenceModel, tiny_preparer: Preparer
) -> None:
    ours = drawn(int8, tiny_preparer, [1, 2])
    error = np.square(ours - drawn(tiny, tiny_preparer, [1, 2])).mean()
    assert error > 0, "nothing was quantized"
    assert 10 * np.log10(255**2 / error) >= TOLERANCE_PSNR_DB
    assert np.abs(ours[:1] - drawn(int8, tiny_preparer, [1])).max() <= 1
