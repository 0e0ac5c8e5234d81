"""Adapters: the same images in mixed batches, individually, and in diffusers; kept in memory within
a budget.
"""

import io
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from shared.errors import ModelFailed, PenstockError
from shared.models.catalog import Catalog, Model
from shared.models.image_entry import Adapter
from shared.models.tasks import Result
from shared.models.tasks.image import ImageInput, ImageResult, choose_adapter
from tests.workers.models import lora_files
from tests.workers.models.batches import model_for
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels
from tests.workers.models.test_image_masks import MASKED
from tests.workers.models.test_image_steps import prepared
from workers.models.image.model import ImageModel
from workers.tasks import preparer_for

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]
ASKED = msgspec.structs.replace(TEXT, guidance_scale=3.0)
READ_LIMIT_S = 60.0


class Drawer:
    """A model with adapters, and its entry."""

    def __init__(self, entry: Model, folder: Path, adapters: Mapping[str, Adapter], **more: Any):
        image = entry.image.model_copy(update={"adapters": dict(adapters), **more})
        self.entry = entry.model_copy(update={"image": image})
        self.preparer = preparer_for(self.entry, folder)
        model = model_for(self.entry, folder, "cpu")
        assert isinstance(model, ImageModel)
        self.model = model
        self.model.setup()

    def with_adapter(
        self, value: ImageInput, name: str | None, scale: float | None = None
    ) -> ImageInput:
        return msgspec.structs.replace(value, adapter=choose_adapter(self.entry, name, scale))

    def run(self, *arrivals: tuple[int, ImageInput]) -> dict[int, Result | PenstockError]:
        """Admits each input before the step with its number.

        Only steps that computed something count.
        """
        results: dict[int, Result | PenstockError] = {}
        left, inside, step = dict(enumerate(arrivals)), set[int](), 0
        until_s = time.monotonic() + READ_LIMIT_S
        while left or inside:
            assert time.monotonic() < until_s, "the images never ended"
            for slot, (joins, _) in list(left.items()):
                if joins <= step or not inside:
                    self.model.admit(slot, prepared(self.preparer, left.pop(slot)[1]))
                    inside.add(slot)
            end = self.model.step()
            step += end.work > 0
            results |= end.results
            inside -= end.results.keys()
        return results

    def alone(self, value: ImageInput) -> np.ndarray:
        result = self.run((0, value))[0]
        assert isinstance(result, ImageResult), result
        return pixels(result)


@pytest.fixture(scope="session")
def plain(family: TinyPipeline) -> Any:
    """The same pipeline, as diffusers loads it."""
    return loaded(family.folder)


def loaded(folder: Path) -> Any:
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def files(
    family: TinyPipeline, plain: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One file per format. The second has no text layers, and the last has convolutions."""
    folder = tmp_path_factory.mktemp("adapters")
    written = {}
    for seed, (name, form) in enumerate(lora_files.FORMATS.items()):
        layers = lora_files.chosen_layers(plain, texts=name != "diffusers")
        weights = lora_files.random_weights(layers, seed, rank=2 + 2 * seed)
        written[name] = lora_files.write(folder / f"{name}.safetensors", form(weights))
    layers = lora_files.chosen_layers(plain, texts=False, convolutions=True)
    tensors = lora_files.as_peft(lora_files.random_weights(layers, 9, rank=3))
    settings = {"unet.r": 3, "unet.lora_alpha": 6, "unet.target_modules": [*layers["unet"]]}
    written["convolutions"] = lora_files.write(folder / "all.safetensors", tensors, settings)
    return written


@pytest.fixture(scope="session")
def drawer(catalog: Catalog, family: TinyPipeline, files: dict[str, Path]) -> Drawer:
    adapters = {
        name: Adapter(source=f"local:{file}", digest=lora_files.digest_of(file))
        for name, file in files.items()
    }
    return Drawer(catalog.default("image"), family.folder, adapters)


def by_diffusers(
    pipeline: Any, drawer: Drawer, value: ImageInput, file: Path, scale: float
) -> np.ndarray:
    """The image that diffusers draws with a single adapter."""
    pipeline.load_lora_weights(file, adapter_name="one")
    pipeline.set_adapters(["one"], [scale])
    try:
        pipeline.scheduler = drawer.model._schedulers.create(value.scheduler)
        arguments: dict[str, Any] = {}
        drawing = pipeline
        if value.image is not None:
            drawing = diffusers.AutoPipelineForImage2Image.from_pipe(pipeline)
            drawing.set_progress_bar_config(disable=True)
            drawing.scheduler = pipeline.scheduler
            source = Image.open(io.BytesIO(value.image.data or b"")).convert("RGB")
            arguments = {"image": source, "strength": value.strength}
        else:
            arguments = {"width": value.width, "height": value.height}
        drawn = drawing(
            value.prompt,
            negative_prompt=value.negative_prompt or None,
            num_inference_steps=value.steps,
            guidance_scale=value.guidance_scale,
            generator=torch.Generator().manual_seed(value.seed),
            **arguments,
        ).images[0]
    finally:
        pipeline.delete_adapters("one")
    return np.asarray(drawn).astype(int)


SCALES = {"peft": 1.0, "diffusers": 0.6, "kohya": 1.5, "convolutions": -0.7}


@pytest.mark.parametrize("name", SCALES)
def test_an_adapter_draws_as_in_diffusers(
    drawer: Drawer, plain: Any, files: dict[str, Path], name: str
) -> None:
    without = drawer.alone(ASKED)
    for value in (ASKED, msgspec.structs.replace(FROM_IMAGE, scheduler="euler")):
        ours = drawer.alone(drawer.with_adapter(value, name, SCALES[name]))
        theirs = by_diffusers(plain, drawer, value, files[name], SCALES[name])
        assert np.abs(ours - theirs).max() <= 1
        if value is ASKED:
            assert np.abs(ours - without).mean() > 2, "the adapter changed nothing"


def test_alphas_of_layers_count(
    catalog: Catalog, family: TinyPipeline, drawer: Drawer, tmp_path: Path
) -> None:
    """They also count if kohya's files have different alphas per layer, which diffusers ignores in
    attention.
    """
    layers = lora_files.chosen_layers(drawer.model._main, texts=True)
    weights, alphas = lora_files.random_weights(layers, 3), (1.0, 2.0, 8.0)
    scaled = {
        name: (down, up * (alphas[number % 3] / 4))
        for number, (name, (down, up)) in enumerate(weights.items())
    }
    kohya = lora_files.write(tmp_path / "kohya.safetensors", lora_files.as_kohya(weights, alphas))
    peft = lora_files.write(tmp_path / "peft.safetensors", lora_files.as_peft(scaled))
    other = Drawer(
        catalog.default("image"),
        family.folder,
        {file.stem: Adapter(source=f"local:{file}") for file in (kohya, peft)},
    )
    images = [other.alone(other.with_adapter(ASKED, name)) for name in ("kohya", "peft")]
    assert np.abs(images[0] - images[1]).max() <= 1


def test_adapters_in_one_batch_draw_as_alone(drawer: Drawer) -> None:
    """Each adapter has its own scale, steps and scheduler, and some images in the batch use
    none.
    """
    values = [
        drawer.with_adapter(
            msgspec.structs.replace(
                ASKED,
                seed=seed,
                steps=4 + seed % 3,
                scheduler=("ddim", "euler", "dpmpp_2m")[seed % 3],
                guidance_scale=1.0 if seed == 4 else 3.0,
            ),
            name,
            scale,
        )
        for seed, (name, scale) in enumerate(
            [*SCALES.items(), ("peft", 0.3), ("peft", 1.0), (None, None), ("kohya", 0.0)]
        )
    ]
    alone = [drawer.alone(value) for value in values]
    results = drawer.run(*((number // 2, value) for number, value in enumerate(values)))
    for slot, image in enumerate(alone):
        result = results[slot]
        assert isinstance(result, ImageResult)
        assert np.abs(pixels(result) - image).max() <= 1, values[slot]
        chosen = values[slot].adapter
        assert result.adapter == (None if chosen is None else chosen.name)


def test_scale_0_is_no_adapter(drawer: Drawer) -> None:
    off = drawer.alone(drawer.with_adapter(ASKED, "peft", 0.0))
    assert np.abs(off - drawer.alone(ASKED)).max() <= 1


def test_masked_images_have_adapters(drawer: Drawer) -> None:
    masked = drawer.with_adapter(MASKED, "peft")
    results = drawer.run((0, masked), (0, drawer.with_adapter(ASKED, "kohya")), (1, MASKED))
    images = []
    for slot, value in ((0, masked), (2, MASKED)):
        result = results[slot]
        assert isinstance(result, ImageResult)
        images.append(pixels(result))
        assert np.abs(images[-1] - drawer.alone(value)).max() <= 1
    inside = np.zeros((64, 64), bool)
    inside[8:41, 19:50] = True
    assert np.array_equal(images[0][~inside], images[1][~inside])
    assert np.abs(images[0] - images[1])[inside].mean() > 2


# The tests below are about memory, files and threads, so one family is enough for them.


@pytest.fixture(scope="session")
def small(catalog: Catalog, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Drawer:
    """A model with six adapters, two of which fit in memory."""
    folder = tmp_path_factory.mktemp("six")
    layers = lora_files.chosen_layers(loaded(tiny_folder), texts=False)
    adapters, taken = {}, 0
    for seed in range(6):
        weights = lora_files.random_weights(layers, seed)
        file = lora_files.write(folder / f"{seed}.safetensors", lora_files.as_peft(weights))
        taken = sum(one.numel() * 4 for both in weights.values() for one in both)
        adapters[f"a{seed}"] = Adapter(source=f"local:{file}")
    entry = catalog.default("image")
    return Drawer(entry, tiny_folder, adapters, adapter_memory_bytes=int(2.5 * taken))


def test_least_recently_used_adapters_make_room(small: Drawer) -> None:
    adapters = small.model.adapters
    seen = []
    for name in ("a0", "a1", "a0", "a2", "a1"):
        small.alone(small.with_adapter(ASKED, name))
        seen.append(adapters.resident_names)
        assert adapters.resident_bytes <= small.entry.image.adapter_memory_bytes
    assert seen == [["a0"], ["a0", "a1"], ["a1", "a0"], ["a0", "a2"], ["a2", "a1"]]


def test_more_adapters_at_a_time_than_fit_wait_for_each_other(small: Drawer) -> None:
    """No image starves: one that is waiting for room gets it before later arrivals do."""
    values = [
        small.with_adapter(msgspec.structs.replace(ASKED, seed=seed), f"a{seed % 6}")
        for seed in range(8)
    ]
    alone = {slot: small.alone(values[slot]) for slot in (0, 5, 7)}
    results = small.run(*((0, value) for value in values))
    assert small.model.adapters.resident_bytes <= small.entry.image.adapter_memory_bytes
    assert all(isinstance(one, ImageResult) for one in results.values())
    for slot, image in alone.items():
        result = results[slot]
        assert isinstance(result, ImageResult)
        assert np.abs(pixels(result) - image).max() <= 1


def test_a_read_delays_no_step_of_others(
    small: Drawer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The adapter's file never arrives, but all other images are drawn, and this image can be
    dropped.
    """
    pipe = tmp_path / "never.safetensors"
    os.mkfifo(pipe)
    file = small.entry.image.adapters["a5"].source.removeprefix("local:")
    monkeypatch.setattr(
        "workers.models.image.resident_adapters.resolve_file",
        lambda source, revision, cache_dir, weights_dir: (
            pipe if source == f"local:{file}" else Path(source.removeprefix("local:"))
        ),
    )
    adapters = small.model.adapters
    adapters._resident.pop("a5", None)
    small.model.admit(99, prepared(small.preparer, small.with_adapter(ASKED, "a5")))
    results = small.run((0, ASKED), (0, small.with_adapter(ASKED, "a1")))
    assert all(isinstance(one, ImageResult) for one in results.values())
    assert adapters.waiting == [99]
    end = small.model.step()
    assert (end.waiting, end.work) == ([99], 0)
    small.model.drop(99)
    assert adapters.waiting == []
    # The thread gets an end-of-file and discards what it has read.
    pipe.open("wb").close()
    small.alone(small.with_adapter(ASKED, "a0"))


Break = Callable[[Path], Adapter]


def rewritten(file: Path, **changes: Any) -> Adapter:
    return Adapter(source=f"local:{file}", **changes)


def pickled(file: Path) -> Adapter:
    torch.save({"unet.a.lora_A.weight": torch.zeros(1)}, file)
    return rewritten(file)


def cut_short(file: Path) -> Adapter:
    file.write_bytes(file.read_bytes()[:-100])
    return rewritten(file)


def gone(file: Path) -> Adapter:
    file.unlink()
    return rewritten(file)


def with_tensor(name: str, *shape: int) -> Break:
    def break_(file: Path) -> Adapter:
        lora_files.write(file, {name: torch.zeros(shape)})
        return rewritten(file)

    return break_


DEEP = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
BROKEN: dict[str, tuple[Break, str]] = {
    "pickle": (pickled, "not safetensors"),
    "cut": (cut_short, "file not fully covered"),
    "gone": (gone, "missing from this worker"),
    "rank": (lambda file: rewritten(file, max_rank=3), "rank 4, which exceeds max_rank (3)"),
    "digest": (lambda file: rewritten(file, digest=f"sha256:{'0' * 64}"), "the digest"),
    "dora": (with_tensor(f"{DEEP}.lora_magnitude_vector", 4), "DoRA"),
    "lokr": (with_tensor("lora_unet_mid_block.lokr_w1", 4), "LoKr"),
    "kohya": (with_tensor("lora_unet_what.lora_down.weight", 4, 4), "unknown layer names"),
    "half": (with_tensor(f"{DEEP}.lora_A.weight", 4, 128), "must have both weights"),
    "elsewhere": (with_tensor("transformer.a.lora_A.weight", 4, 4), "this model does not have"),
    "no such layer": (with_tensor("unet.nowhere.lora_A.weight", 4, 4), "this model does not have"),
    "bias": (with_tensor(f"{DEEP}.lora_B.bias", 4), "must have both weights"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_cannot_be_used_is_refused_by_name(
    small: Drawer, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = Path(small.entry.image.adapters["a3"].source.removeprefix("local:"))
    file = tmp_path / "broken.safetensors"
    file.write_bytes(source.read_bytes())
    break_, reason = BROKEN[kind]
    broken = break_(file)
    adapters = small.entry.image.adapters | {"broken": broken}
    image = small.entry.image.model_copy(update={"adapters": adapters})
    monkeypatch.setattr(small.model.adapters, "_image", image)
    monkeypatch.setattr(small, "entry", small.entry.model_copy(update={"image": image}))
    monkeypatch.setattr(small, "preparer", preparer_for(small.entry, tiny_folder))
    results = small.run((0, small.with_adapter(ASKED, "broken")), (0, ASKED))
    error = results[0]
    assert isinstance(error, ModelFailed)
    assert error.public_message.startswith("adapter 'broken': ")
    assert reason in error.public_message
    assert str(tmp_path) not in error.public_message
    assert error.field == "lora_weights"
    assert isinstance(results[1], ImageResult), "others are drawn"


def test_an_adapter_larger_than_the_budget_is_refused(
    small: Drawer, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = small.entry.image.model_copy(update={"adapter_memory_bytes": 1000})
    monkeypatch.setattr(small.model.adapters, "_image", image)
    small.model.adapters._resident.clear()
    error = small.run((0, small.with_adapter(ASKED, "a0")))[0]
    assert isinstance(error, ModelFailed)
    assert "image.adapter_memory_bytes (1000)" in error.public_message


def test_a_worker_with_another_adapter_of_the_name_refuses(small: Drawer) -> None:
    """Otherwise its image would be cached under the key of the adapter in the API's catalog."""
    value = small.with_adapter(ASKED, "a0")
    assert value.adapter is not None
    newer = msgspec.structs.replace(value.adapter, version=f"sha256:{'1' * 64}")
    (outcome,) = small.preparer.prepare([msgspec.structs.replace(value, adapter=newer)])
    assert isinstance(outcome, ModelFailed)
    assert "'a0'" in outcome.message


def test_whole_batches_wait_for_their_adapters(small: Drawer) -> None:
    item = prepared(small.preparer, small.with_adapter(ASKED, "a0"))
    (whole,) = small.model.predict([item], lambda step, steps: None)
    assert isinstance(whole, ImageResult)
    joined = small.alone(small.with_adapter(ASKED, "a0"))
    assert np.abs(pixels(whole) - joined).max() <= 1
