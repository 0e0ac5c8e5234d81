"""IP-Adapters in a compiled UNet. Dynamo and its guards are real, but what they guard runs without
a compiler.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from shared.models.catalog import Catalog
from shared.models.image_entry import Adapter
from shared.models.tasks.image import ImageInput, ImageResult, IpAdapterInput
from tests.workers.models import lora_files
from tests.workers.models.ip_adapter_files import write
from tests.workers.models.test_image import TEXT, pixels
from tests.workers.models.test_image_adapters import Drawer
from tests.workers.models.test_ip_adapters import OTHER_PICTURE, PICTURE, entry_with
from workers.models.image.compilation import compile_parts

pytestmark = [
    pytest.mark.slow(about_s=130),
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

GUIDED = msgspec.structs.replace(TEXT, guidance_scale=3.0, steps=4)


class Both(NamedTuple):
    """A compiled model, and the same model without the compiler."""

    compiled: Drawer
    eager: Drawer

    def after(self, value: ImageInput, name: str, scale: float = 1.0) -> ImageInput:
        """An image with an IP-Adapter. The adapters have different numbers of tokens."""
        version = self.eager.entry.image.ip_adapters[name].version
        image = PICTURE if name == "plain" else OTHER_PICTURE
        return msgspec.structs.replace(
            value, ip_adapter=IpAdapterInput(name, version, image, scale)
        )

    def check(self, *values: ImageInput) -> None:
        """Draws images together, compiled, and compares each with the same image drawn alone."""
        results = self.compiled.run(*((0, value) for value in values))
        for slot, value in enumerate(values):
            result = results[slot]
            assert isinstance(result, ImageResult), result
            assert np.abs(pixels(result) - self.eager.alone(value)).max() <= 1, value


@pytest.fixture(scope="module")
def both(catalog: Catalog, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("compiled-ip")
    folders = {
        name: write(folder / name, tiny_folder, seed, is_plus=name == "plus")
        for seed, name in enumerate(("plain", "plus"))
    }
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(tiny_folder, local_files_only=True)
    layers = lora_files.chosen_layers(pipeline, texts=False)
    tensors = lora_files.FORMATS["diffusers"](lora_files.random_weights(layers, 3, rank=4))
    file = lora_files.write(folder / "a.safetensors", tensors)
    adapters = {"ink": Adapter(source=f"local:{file}")}
    entry = entry_with(catalog.default("image"), folders, guidance_scale=3.0, compiled_rank=8)
    batch = entry.batch.model_copy(update={"max_items": 2})
    entry = entry.model_copy(update={"batch": batch})
    with pytest.MonkeyPatch.context() as patch:
        torch._dynamo.reset()
        traced = partial(compile_parts, backend="eager")
        patch.setattr("workers.models.image.pipeline.compile_parts", traced)
        compiled = Drawer(entry, tiny_folder, adapters, compile="always")
    compiled.model._warmup_limit_s = float("inf")  # however busy this machine is
    compiled.model.warmup()
    return Both(compiled, Drawer(entry, tiny_folder, adapters))


def test_reference_images_change_without_compiling_again(both: Both) -> None:
    """Covers images alone and together, with other reference images, scales, adapters, and steps
    from image to image.
    """
    graphs = counters["stats"]["unique_graphs"]
    assert graphs
    plain, plus = both.after(GUIDED, "plain"), both.after(GUIDED, "plus", 0.7)
    both.check(GUIDED)
    both.check(plain)
    both.check(plus)
    both.check(plus, msgspec.structs.replace(plain, seed=3, steps=6))
    both.check(GUIDED, plus)
    both.check(both.compiled.with_adapter(plain, "ink", 0.9), GUIDED)
    both.check(both.compiled.with_adapter(GUIDED, "ink"), both.after(GUIDED, "plain", 0.4))
    both.check(GUIDED)
    assert counters["stats"]["unique_graphs"] == graphs
    assert both.compiled.model.take_eager_calls() == 0


def test_more_rows_than_compiled_code_has_room_for(both: Both) -> None:
    """At other sizes, a batch may have more images, which are drawn eagerly."""
    small = msgspec.structs.replace(GUIDED, width=32, height=32)
    values = [both.after(small, name) for name in ("plain", "plus", "plain")]
    both.check(*values, small)
    both.check(both.after(GUIDED, "plus"))
    assert both.compiled.model.take_eager_calls() == 0
