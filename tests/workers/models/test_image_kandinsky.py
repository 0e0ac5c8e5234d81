"""Kandinsky 2.2, which combines two pipelines: the denoisers of both share calls."""

import io
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from shared.errors import BadInput
from shared.models.catalog import Catalog
from shared.models.tasks.image import ImageInput
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.plain_diffusers import plain_pipeline
from tests.workers.models.test_image import pixels
from tests.workers.models.test_image_drawing import joining
from tests.workers.models.test_image_families import OWN, OWN_FROM_IMAGE, entry_of, far, loaded
from tests.workers.models.test_image_steps import prepared
from tests.workers.models.tiny_kandinsky import TOKENS, kandinsky_parts
from workers.models.image.model import ImageModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def kandinsky(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> TinyPipeline:
    torch.manual_seed(6)
    folder = tmp_path_factory.mktemp("kandinsky") / "model"
    diffusers.KandinskyV22CombinedPipeline(**kandinsky_parts()).save_pretrained(folder)
    return loaded(entry_of(catalog), folder)


def plain(folder: Path, value: ImageInput) -> np.ndarray:
    kind, source = diffusers.KandinskyV22CombinedPipeline, dict[str, Any]()
    if value.image is not None:
        kind = diffusers.KandinskyV22Img2ImgCombinedPipeline
        image = Image.open(io.BytesIO(value.image.data or b"")).convert("RGB")
        source = {"image": image, "strength": value.strength}
    drawn = plain_pipeline(kind, folder)(
        prompt=value.prompt,
        guidance_scale=value.guidance_scale,
        width=value.width,
        height=value.height,
        num_inference_steps=value.steps,
        generator=torch.Generator().manual_seed(value.seed),
        **source,
    ).images[0]
    return np.asarray(drawn).astype(int)


def test_images_are_those_of_plain_diffusers(kandinsky: TinyPipeline) -> None:
    values = [
        OWN,
        msgspec.structs.replace(OWN, seed=2, steps=3, prompt="red"),
        msgspec.structs.replace(OWN_FROM_IMAGE, seed=3),
    ]
    assert isinstance(kandinsky.model, ImageModel)
    kandinsky.model.warmup()
    assert not kandinsky.model.runs_alone
    for value, result in zip(
        values, joining(kandinsky.model, kandinsky.preparer, values), strict=True
    ):
        assert far(pixels(result), plain(kandinsky.folder, value)) <= 1


def test_tokens_lost_by_an_inner_pipeline_are_counted(kandinsky: TinyPipeline) -> None:
    value = msgspec.structs.replace(OWN, prompt="a" * 20)
    (result,) = joining(kandinsky.model, kandinsky.preparer, [value])
    assert result.truncated_tokens == 20 + len(("begin", "end")) - TOKENS


def test_no_scheduler_replaces_one_that_takes_predicted_variances(kandinsky: TinyPipeline) -> None:
    item = prepared(kandinsky.preparer, msgspec.structs.replace(OWN, scheduler="ddim"))
    (outcome,) = kandinsky.model.predict([item], lambda step, steps: None)
    assert isinstance(outcome, BadInput)
    assert outcome.field == "scheduler"
