"""Adapters and ControlNets in a compiled UNet. Dynamo and its guards are real, but what they guard
runs without a compiler.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from shared.models.catalog import Catalog
from shared.models.image_entry import Adapter, Control
from shared.models.tasks.image import ControlInput, ImageInput, ImageResult
from tests.workers.models import lora_files
from tests.workers.models.test_controls import PICTURE, write_control
from tests.workers.models.test_image import TEXT, pixels
from tests.workers.models.test_image_adapters import Drawer, loaded
from workers.models.image.compilation import compile_parts

pytestmark = [
    pytest.mark.slow(about_s=75),
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

GUIDED = msgspec.structs.replace(TEXT, guidance_scale=3.0, steps=5)
CONTROLLED = msgspec.structs.replace(
    GUIDED, control=ControlInput("depth", "", PICTURE, 1.0), seed=4
)
SCALES = {"peft": 1.0, "diffusers": 0.6, "kohya": 1.5}
TOLERANCE = 1e-5


class Compiled(NamedTuple):
    """A compiled model, the same model without the compiler, and plain diffusers."""

    compiled: Drawer
    eager: Drawer
    plain: Any
    files: dict[str, Path]
    ran_eagerly: list[int]
    """The row counts of the UNet's eager calls."""


def write_files(folder: Path, pipeline: Any) -> dict[str, Path]:
    """One adapter per format, one with convolutions, and one with a high rank."""
    written = {}
    for seed, name in enumerate([*SCALES, "high"]):
        layers = lora_files.chosen_layers(pipeline, texts=name == "peft")
        weights = lora_files.random_weights(layers, seed, rank=16 if name == "high" else 2 + seed)
        form = lora_files.FORMATS.get(name, lora_files.as_peft)
        written[name] = lora_files.write(folder / f"{name}.safetensors", form(weights))
    layers = lora_files.chosen_layers(pipeline, texts=False, convolutions=True)
    tensors = lora_files.as_peft(lora_files.random_weights(layers, 9, rank=3))
    written["convolutions"] = lora_files.write(folder / "convolutions.safetensors", tensors)
    return written


@pytest.fixture(scope="module")
def both(catalog: Catalog, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compiled")
    plain = loaded(tiny_folder)
    files = write_files(folder, plain)
    control = write_control(folder / "depth", tiny_folder, 0)
    entry = catalog.default("image")
    batch = entry.batch.model_copy(update={"max_items": 2})
    entry = entry.model_copy(update={"batch": batch})
    adapters = {name: Adapter(source=f"local:{file}") for name, file in files.items()}
    more: dict[str, Any] = {
        "controls": {"depth": Control(source=f"local:{control}")},
        "guidance_scale": 3.0,
        "compiled_rank": 8,
    }
    with pytest.MonkeyPatch.context() as patch:
        torch._dynamo.reset()
        traced = partial(compile_parts, backend="eager")
        patch.setattr("workers.models.image.pipeline.compile_parts", traced)
        compiled = Drawer(entry, tiny_folder, adapters, compile="always", **more)
    compiled.model._warmup_limit_s = float("inf")  # however busy this machine is
    compiled.model.warmup()
    ran_eagerly: list[int] = []
    # A compiled graph has no modules for a hook to see, so only eager calls get here.
    compiled.model._main.unet.conv_norm_out.register_forward_hook(
        lambda module, given, output: ran_eagerly.append(len(output))
    )
    eager = Drawer(entry, tiny_folder, adapters, **more)
    return Compiled(compiled, eager, plain, files, ran_eagerly)


def check_pixels(both: Compiled, *values: ImageInput) -> None:
    """Draws images together, compiled, and compares each with the same image drawn alone."""
    results = both.compiled.run(*((0, value) for value in values))
    for slot, value in enumerate(values):
        result = results[slot]
        assert isinstance(result, ImageResult), result
        assert np.abs(pixels(result) - both.eager.alone(value)).max() <= 1, value


def test_adapters_and_controls_change_without_compiling_again(both: Compiled) -> None:
    """Covers images alone and together, with other adapters, scales and steps from image to image,
    with controls, and without any of them.
    """
    both.ran_eagerly.clear()
    before = counters["stats"]["unique_graphs"]
    assert before
    adapted = {
        name: both.compiled.with_adapter(GUIDED, name, scale) for name, scale in SCALES.items()
    }
    check_pixels(both, GUIDED)
    for value in adapted.values():
        check_pixels(both, value)
    check_pixels(both, adapted["peft"], msgspec.structs.replace(adapted["kohya"], seed=3, steps=7))
    check_pixels(both, adapted["diffusers"], GUIDED)
    check_pixels(both, CONTROLLED, GUIDED)
    check_pixels(both, both.compiled.with_adapter(CONTROLLED, "kohya", 0.5), adapted["peft"])
    check_pixels(both, both.compiled.with_adapter(CONTROLLED, "peft"), GUIDED, adapted["kohya"])
    check_pixels(both, CONTROLLED)
    assert counters["stats"]["unique_graphs"] == before
    assert both.ran_eagerly == []
    assert both.compiled.model.take_eager_calls() == 0
    assert both.eager.model.take_eager_calls() == 0


def unet_inputs(unet: Any, rows: int, seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    side = 64 // 8
    return {
        "sample": torch.randn(rows, unet.config.in_channels, side, side, generator=random),
        "timestep": torch.full((rows,), 300.0),
        "encoder_hidden_states": torch.randn(
            rows, 77, unet.config.cross_attention_dim, generator=random
        ),
        "return_dict": False,
    }


def test_noise_is_as_with_peft(both: Compiled) -> None:
    """Two adapters share the call. PEFT computes them one after the other."""
    model = both.compiled.model
    for name, scale in SCALES.items():
        both.compiled.alone(both.compiled.with_adapter(GUIDED, name, scale))
    unet = model._main.unet
    inputs = unet_inputs(unet, 4, seed=1)
    resident = model.adapters._resident
    for first, second in (("peft", "kohya"), ("diffusers", "peft"), ("kohya", "diffusers")):
        rows = [(resident[name], SCALES[name]) for name in (first, second) for _ in range(2)]
        with torch.inference_mode(), model.adapters.apply("unet", rows):
            ours = unet(**inputs)[0].clone()
        for name, own in ((first, slice(0, 2)), (second, slice(2, 4))):
            both.plain.load_lora_weights(both.files[name], adapter_name="one")
            both.plain.set_adapters(["one"], [SCALES[name]])
            with torch.inference_mode():
                theirs = both.plain.unet(**inputs)[0]
            both.plain.delete_adapters("one")
            assert (ours[own] - theirs[own]).abs().max() <= TOLERANCE
            with torch.inference_mode():
                without = both.plain.unet(**inputs)[0]
            assert (ours[own] - without[own]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["convolutions", "high"])
def test_adapters_without_room_run_eagerly_and_are_counted(both: Compiled, name: str) -> None:
    """Afterward, other images still find their compiled code."""
    both.ran_eagerly.clear()
    graphs = counters["stats"]["unique_graphs"]
    check_pixels(both, both.compiled.with_adapter(GUIDED, name, 0.7))
    assert len(both.ran_eagerly) == GUIDED.steps
    assert both.compiled.model.take_eager_calls() == GUIDED.steps
    both.ran_eagerly.clear()
    check_pixels(both, GUIDED, both.compiled.with_adapter(GUIDED, "peft", 0.7))
    assert both.ran_eagerly == []
    assert both.compiled.model.take_eager_calls() == 0
    assert counters["stats"]["unique_graphs"] == graphs


def test_an_unknown_row_count_is_counted(both: Compiled) -> None:
    """Without guidance, an image has one row, which warm-up doesn't compile with an adapter."""
    unguided = msgspec.structs.replace(GUIDED, guidance_scale=1.0)
    check_pixels(both, unguided)
    assert both.compiled.model.take_eager_calls() == 0
    check_pixels(both, both.compiled.with_adapter(unguided, "peft"))
    assert both.compiled.model.take_eager_calls() == GUIDED.steps
    check_pixels(both, msgspec.structs.replace(GUIDED, width=48))
    assert both.compiled.model.take_eager_calls() == 0, "other sizes are never compiled"


def test_more_adapters_than_slots_take_turns(both: Compiled) -> None:
    """The two slots are filled again whenever other adapters arrive, also after an eviction."""
    adapters = both.compiled.model.adapters
    for pair in (("peft", "kohya"), ("diffusers", "kohya"), ("peft", "diffusers")):
        check_pixels(both, *(both.compiled.with_adapter(GUIDED, name) for name in pair))
    adapters._forget("peft")
    check_pixels(both, both.compiled.with_adapter(GUIDED, "peft"))
    assert both.compiled.model.take_eager_calls() == 0
