"""ControlNets: images with and without one are the same in a batch, individually, and in
diffusers.
"""

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from models.shapes.draw import draw
from models.shapes.judge import overlap, silhouette
from models.shapes.score import held_out
from shared.errors import ConfigurationError
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from shared.models.image_entry import Control
from shared.models.tasks.image import ControlInput, ImageInput, ImageResult
from tests.workers.models.batches import model_for
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels
from tests.workers.models.test_image_masks import MASKED, as_png, box, write_tiny
from tests.workers.models.test_image_steps import OTHERS, run
from workers.models.base import PreparedImage, Preparer, SteppedModel
from workers.models.image.model import ImageModel
from workers.tasks import WORKER_TASKS, preparer_for

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]


def write_control(folder: Path, pipeline: Path, seed: int) -> Path:
    """A ControlNet for the pipeline's UNet, with random weights that change images a lot."""
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel.from_pretrained(pipeline / "unet")
    control = diffusers.ControlNetModel.from_unet(
        unet, conditioning_embedding_out_channels=(16, 16, 32, 32)
    )
    last = [control.controlnet_cond_embedding.conv_out, control.controlnet_mid_block]
    for layer in [*control.controlnet_down_blocks, *last]:
        torch.nn.init.normal_(layer.weight, std=0.3 / layer.weight[0].numel() ** 0.5)
    control.save_pretrained(folder)
    return folder


def entry_with(catalog: Catalog, **folders: Path) -> Model:
    entry = catalog.default("image")
    controls = {
        name: Control(source=f"local:{folder}", preprocessor="canny" if name == "edges" else "none")
        for name, folder in folders.items()
    }
    image = entry.image.model_copy(update={"controls": controls})
    return entry.model_copy(update={"image": image})


@pytest.fixture(scope="session")
def controlled(
    catalog: Catalog, family: TinyPipeline, tmp_path_factory: pytest.TempPathFactory
) -> TinyPipeline:
    """Each family's pipeline, with two controls."""
    folder = tmp_path_factory.mktemp("controls")
    folders = {
        name: write_control(folder / name, family.folder, seed)
        for seed, name in enumerate(("edges", "depth"))
    }
    entry = entry_with(catalog, **folders)
    model = model_for(entry, family.folder, "cpu")
    model.setup()
    return TinyPipeline(folder, preparer_for(entry, family.folder), model)


PICTURE = as_png(box(12, 20, 44, 52, 200).convert("RGB"))
OTHER_PICTURE = as_png(Image.radial_gradient("L").resize((64, 64)).convert("RGB"))


def control(name: str = "depth", image: Blob = PICTURE, scale: float = 1.0, **part: Any) -> Any:
    return ControlInput(name, "", image, scale, **part)


def with_(value: ImageInput, **changes: Any) -> ImageInput:
    return msgspec.structs.replace(value, **changes)


def drawn(
    model: SteppedModel, preparer: Preparer, values: Sequence[ImageInput]
) -> list[np.ndarray]:
    results = run(model, preparer, [(0, value) for value in values])
    images = [results[slot] for slot in range(len(values))]
    assert all(isinstance(one, ImageResult) for one in images), images
    return [pixels(one) for one in images if isinstance(one, ImageResult)]


def test_images_with_and_without_controls_are_drawn_together_as_alone(
    controlled: TinyPipeline,
) -> None:
    """Varies the number of images, the scales, the range of steps, the sources and the masks."""
    assert isinstance(controlled.model, SteppedModel)
    text = with_(TEXT, steps=5, guidance_scale=3.0)
    values = [
        text,
        with_(text, control=control()),
        with_(text, control=control(scale=0.4)),
        with_(text, control=control(image=OTHER_PICTURE, end=0.5)),
        with_(text, control=control("edges", start=0.3)),
        with_(text, control=control("edges", scale=0.0)),
        with_(text, control=control(), more_controls=(control("edges", OTHER_PICTURE, 0.5),)),
        with_(text, guidance_scale=1.0, control=control("edges")),
        with_(FROM_IMAGE, steps=8, guidance_scale=3.0, control=control("edges", OTHER_PICTURE)),
        with_(MASKED, steps=5, guidance_scale=3.0, control=control()),
        *OTHERS,
    ]
    together = drawn(controlled.model, controlled.preparer, values)
    alone = [drawn(controlled.model, controlled.preparer, [value])[0] for value in values]
    for value, one, other in zip(values, together, alone, strict=True):
        assert np.abs(one - other).max() <= 1, value
    for first, second in ((0, 1), (1, 2), (1, 3), (1, 4), (3, 4)):
        assert np.abs(alone[first] - alone[second]).mean() > 0.5, (first, second)
    assert np.array_equal(alone[0], alone[5]), "a scale of 0 changes nothing"


def test_several_controls_are_added_up_as_by_plain_diffusers(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    folders = {
        name: write_control(tmp_path / name, tiny_folder, at) for at, name in enumerate("ab")
    }
    entry = entry_with(catalog, **folders)
    model, preparer = model_for(entry, tiny_folder, "cpu"), preparer_for(entry, tiny_folder)
    model.setup()
    assert isinstance(model, ImageModel)
    second = control("b", OTHER_PICTURE, 0.4, end=0.5)
    both = with_(TEXT, control=control("a", scale=0.7), more_controls=(second,))
    ours, single = drawn(model, preparer, [both, with_(both, more_controls=())])
    nets = [diffusers.ControlNetModel.from_pretrained(folder) for folder in folders.values()]
    parts = diffusers.DiffusionPipeline.from_pretrained(
        tiny_folder, local_files_only=True
    ).components
    plain: Any = diffusers.StableDiffusionControlNetPipeline(
        **parts, controlnet=nets, requires_safety_checker=False
    )
    plain.set_progress_bar_config(disable=True)
    plain.scheduler = model._schedulers.create(TEXT.scheduler)
    image = plain(
        both.prompt,
        image=[opened(PICTURE), opened(OTHER_PICTURE)],
        width=64,
        height=64,
        num_inference_steps=both.steps,
        guidance_scale=both.guidance_scale,
        controlnet_conditioning_scale=[0.7, 0.4],
        control_guidance_end=[1.0, 0.5],
        control_guidance_start=[0.0, 0.0],
        generator=torch.Generator().manual_seed(both.seed),
    ).images[0]
    assert np.abs(ours - np.asarray(image).astype(int)).max() <= 1
    assert np.abs(ours - single).max() > 1


KINDS = {
    ("sd", "text"): "StableDiffusionControlNetPipeline",
    ("sd", "image"): "StableDiffusionControlNetImg2ImgPipeline",
    ("sd", "mask"): "StableDiffusionControlNetInpaintPipeline",
    ("sdxl", "text"): "StableDiffusionXLControlNetPipeline",
    ("sdxl", "image"): "StableDiffusionXLControlNetImg2ImgPipeline",
    ("sdxl", "mask"): "StableDiffusionXLControlNetInpaintPipeline",
}


def opened(blob: Blob | None) -> Image.Image:
    assert blob is not None
    return Image.open(io.BytesIO(blob.data or b""))


class RandomTiny(NamedTuple):
    """A pipeline with random weights and a control, in our version and in diffusers'."""

    family: str
    way: str
    model: ImageModel
    preparer: Preparer
    plain: Any


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def random_tiny(
    request: pytest.FixtureRequest,
    catalog: Catalog,
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> RandomTiny:
    family, way = request.param
    tmp_path = tmp_path_factory.mktemp("controls")
    folder = write_tiny(tmp_path / "tiny", tiny_folder, xl=family == "sdxl", trained=False)
    if (family, way) == ("sdxl", "mask"):
        # This diffusers pipeline does not use the latents' statistics.
        config = folder / "vae" / "config.json"
        without = {"latents_mean": None, "latents_std": None}
        config.write_text(json.dumps(json.loads(config.read_text()) | without))
    entry = entry_with(catalog, depth=write_control(tmp_path / "depth", folder, 3))
    model = model_for(entry, folder, "cpu")
    model.setup()
    assert isinstance(model, ImageModel)
    kind: Any = getattr(diffusers, KINDS[family, way])
    options = {"add_watermarker": False} if family == "sdxl" else {}
    parts = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True).components
    net = diffusers.ControlNetModel.from_pretrained(tmp_path / "depth")
    known = kind.__init__.__code__.co_varnames
    parts = {name: value for name, value in parts.items() if name in known}
    plain = kind(**parts, controlnet=net, **options)
    plain.set_progress_bar_config(disable=True)
    return RandomTiny(family, way, model, preparer_for(entry, folder), plain)


@pytest.mark.parametrize(
    ("scheduler", "part"), [("euler", (0.0, 1.0)), ("heun", (0.2, 0.7))], ids=["whole", "part"]
)
def test_images_are_those_of_plain_diffusers(
    random_tiny: RandomTiny, scheduler: str, part: tuple[float, float]
) -> None:
    _, way, model, preparer, plain = random_tiny
    mask = box(16, 8, 48, 40)
    given = with_(
        {"text": TEXT, "image": FROM_IMAGE, "mask": MASKED}[way],
        scheduler=scheduler,
        steps=6,
        guidance_scale=3.0,
        control=control(scale=0.7, start=part[0], end=part[1]),
        **({"mask": as_png(mask), "strength": 0.6} if way == "mask" else {}),
    )
    (ours,) = drawn(model, preparer, [given])
    plain.scheduler = model._schedulers.create(scheduler)
    images: dict[str, Any] = {"image": opened(PICTURE)}
    if way != "text":
        images = {"image": opened(given.image), "control_image": opened(PICTURE)}
        images["strength"] = given.strength
    if way == "mask":
        images["mask_image"] = mask
    image = plain(
        given.prompt,
        width=64,
        height=64,
        num_inference_steps=given.steps,
        guidance_scale=given.guidance_scale,
        controlnet_conditioning_scale=0.7,
        control_guidance_start=part[0],
        control_guidance_end=part[1],
        generator=torch.Generator().manual_seed(given.seed),
        **images,
    ).images[0]
    difference = np.abs(ours - np.asarray(image).astype(int))
    if way == "mask":
        difference = difference[8:40, 16:48]
    assert difference.max() <= 1


def test_other_pictures_cost_the_same(controlled: TinyPipeline) -> None:
    plain, guided = controlled.preparer.prepare([TEXT, with_(TEXT, control=control())])
    assert isinstance(plain, PreparedImage)
    assert isinstance(guided, PreparedImage)
    assert (guided.length, guided.room) == (plain.length, plain.room)


def test_controls_of_another_model_are_refused(
    catalog: Catalog, tiny_folder: Path, tiny_xl_folder: Path, tmp_path: Path
) -> None:
    of_xl = entry_with(catalog, depth=write_control(tmp_path / "xl", tiny_xl_folder, 1))
    for entry, reason in (
        (of_xl, "trained for a different model: cross_attention_dim 64 instead of 128"),
        (entry_with(catalog, depth=tiny_folder), r"image\.controls\.depth: .*config\.json"),
        (entry_with(catalog, depth=tmp_path / "none"), "is not a folder"),
    ):
        with pytest.raises(ConfigurationError, match=reason) as caught:
            model_for(entry, tiny_folder, "cpu").setup()
        assert caught.value.field == "image.controls.depth"


def test_folders_of_controls_are_weights_of_their_model(
    catalog: Catalog, controlled: TinyPipeline
) -> None:
    entry = entry_with(catalog, depth=controlled.folder / "depth")
    assert WORKER_TASKS["image"].more_weights(entry) == (controlled.folder / "depth",)


SCENES = 16
AT_ONCE = 16
OVERLAP_MIN = 0.7


def test_shapes_keep_the_outlines_of_their_control(catalog: Catalog, tiny_folder: Path) -> None:
    """Measured by the judge, on silhouettes of held-out scenes, of which the model sees edges and
    captions.
    """
    usual = catalog.default("image")
    edges = {"edges": Control(source="package:models/shapes/canny", preprocessor="canny")}
    image = usual.image.model_copy(update={"controls": edges})
    entry = usual.model_copy(update={"image": image})
    model, preparer = model_for(entry, tiny_folder, "cpu"), preparer_for(entry, tiny_folder)
    model.setup()
    assert isinstance(model, SteppedModel)
    overlaps: dict[bool, list[float]] = {False: [], True: []}
    asked = held_out(SCENES)
    for is_controlled, at in itertools.product(overlaps, range(0, SCENES, AT_ONCE)):
        some = asked[at : at + AT_ONCE]
        values = [
            ImageInput(
                prompt=one.caption,
                width=64,
                height=64,
                steps=usual.image.steps,
                guidance_scale=usual.image.guidance_scale,
                seed=one.seed,
                scheduler=usual.image.scheduler,
                control=control("edges", as_png(draw(one.scene))) if is_controlled else None,
            )
            for one in some
        ]
        for one, shown in zip(some, drawn(model, preparer, values), strict=True):
            wanted = silhouette(np.asarray(draw(one.scene)))
            overlaps[is_controlled].append(overlap(wanted, silhouette(shown.astype(np.uint8))))
    means = {is_controlled: np.mean(found) for is_controlled, found in overlaps.items()}
    assert means[True] >= OVERLAP_MIN, means
    assert means[True] > means[False] + 0.03, means
