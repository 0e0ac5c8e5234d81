"""Qwen-Image and its text encoder: guidance is `true_cfg_scale`, and prompt lengths differ."""

import io
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from shared.models.catalog import Catalog
from shared.models.tasks.image import ImageInput
from tests.workers.models import tiny_qwen
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.plain_diffusers import plain_pipeline
from tests.workers.models.test_image import pixels
from tests.workers.models.test_image_drawing import drawn, joining
from tests.workers.models.test_image_families import OWN, OWN_FROM_IMAGE, entry_of, far, loaded
from workers.models.image.model import ImageModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GUIDED = msgspec.structs.replace(OWN, negative_prompt="a lake")
UNGUIDED = msgspec.structs.replace(OWN, guidance_scale=1.0)


@pytest.fixture(scope="module")
def qwen(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> TinyPipeline:
    folder = tiny_qwen.write_folder(tmp_path_factory.mktemp("qwen") / "model")
    return loaded(entry_of(catalog), folder)


def plain(folder: Path, value: ImageInput) -> np.ndarray:
    """Draws with the pipeline's own call. Without a negative prompt, a space enables guidance."""
    kind, source = diffusers.QwenImagePipeline, dict[str, Any]()
    if value.image is not None:
        kind = diffusers.QwenImageImg2ImgPipeline
        image = Image.open(io.BytesIO(value.image.data or b"")).convert("RGB")
        source = {"image": image, "strength": value.strength}
    drawn = plain_pipeline(kind, folder)(
        prompt=value.prompt,
        negative_prompt=value.negative_prompt or " ",
        true_cfg_scale=value.guidance_scale,
        width=value.width,
        height=value.height,
        num_inference_steps=value.steps,
        generator=torch.Generator().manual_seed(value.seed),
        **source,
    ).images[0]
    return np.asarray(drawn).astype(int)


@pytest.mark.parametrize(
    "value", [OWN, GUIDED, UNGUIDED, OWN_FROM_IMAGE], ids=["space", "prompt", "none", "image"]
)
def test_guidance_is_that_of_plain_diffusers(qwen: TinyPipeline, value: ImageInput) -> None:
    (result,) = drawn(qwen.model, qwen.preparer, [value])
    assert far(pixels(result), plain(qwen.folder, value)) <= 1


def test_images_in_company_are_those_alone(qwen: TinyPipeline) -> None:
    values = [
        OWN,
        GUIDED,
        UNGUIDED,
        msgspec.structs.replace(OWN, prompt="a much longer prompt about a mill", seed=3),
        OWN_FROM_IMAGE,
        msgspec.structs.replace(GUIDED, width=48, steps=6),
    ]
    together = joining(qwen.model, qwen.preparer, values)
    for value, result in zip(values, together, strict=True):
        (alone,) = drawn(qwen.model, qwen.preparer, [value])
        assert far(pixels(result), pixels(alone)) <= 1


def test_every_option_counts(qwen: TinyPipeline) -> None:
    images = [
        pixels(result) for result in drawn(qwen.model, qwen.preparer, [OWN, GUIDED, UNGUIDED])
    ]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert far(images[first], images[second]) > 0


def test_tokens_that_are_not_read_are_counted(qwen: TinyPipeline) -> None:
    """The prompt template has tokens too. Here, each byte is a token."""
    short, long = (msgspec.structs.replace(OWN, prompt="a" * count) for count in (8, 2000))
    (many,), (few,) = (drawn(qwen.model, qwen.preparer, [value]) for value in (long, short))
    assert many.truncated_tokens is not None
    assert many.truncated_tokens > 900
    assert few.truncated_tokens == 0, "the negative prompt, which was kept, has counts of its own"


def test_images_share_calls_after_the_warm_up(catalog: Catalog, qwen: TinyPipeline) -> None:
    """On the first call, the text encoder gets hooks from transformers, which stay in place."""
    model = loaded(entry_of(catalog), qwen.folder).model
    assert isinstance(model, ImageModel)
    model.warmup()
    assert not model.runs_alone


def test_interface_has_the_fields_of_the_pipeline(qwen: TinyPipeline) -> None:
    assert isinstance(qwen.model, ImageModel)
    interface = qwen.model.interface
    assert interface.tasks == ("text", "image", "mask")
    assert interface.fields == ("guidance_scale", "negative_prompt", "strength")
