"""With or without an IP-Adapter, an image is the same in a batch, on its own, and in diffusers."""

import importlib.util
import io
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from shared.errors import ConfigurationError
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from shared.models.image_entry import Adapter, Control, DeepCacheSettings, IpAdapter
from shared.models.tasks.image import ControlInput, ImageInput, IpAdapterInput
from tests.limits import START_LIMIT_S
from tests.workers.models import ip_adapter_files, lora_files
from tests.workers.models.batches import model_for
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.ip_adapter_files import WEIGHT_NAME, write
from tests.workers.models.test_controls import drawn, write_control
from tests.workers.models.test_image import FROM_IMAGE, TEXT
from tests.workers.models.test_image_adapters import Drawer
from tests.workers.models.test_image_masks import MASKED, as_png, box
from tests.workers.models.test_image_steps import OTHERS, prepared
from workers.models.base import PreparedImage
from workers.models.image.model import ImageModel
from workers.models.reports import ItemEnded, StepMessage
from workers.runtime.pool import HostedModel, ModelPool
from workers.tasks import WORKER_TASKS, preparer_for

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

PICTURE = as_png(box(12, 20, 60, 44, 200).resize((90, 50)).convert("RGB"))
OTHER_PICTURE = as_png(
    Image.merge("RGB", [Image.linear_gradient("L").rotate(90 * n) for n in range(3)])
)
GUIDED = msgspec.structs.replace(TEXT, steps=5, guidance_scale=3.0)


def entry_with(entry: Model, folders: Mapping[str, Path], **more: Any) -> Model:
    known = {
        name: IpAdapter(source=f"local:{folder}", weight_name=WEIGHT_NAME)
        for name, folder in folders.items()
    }
    image = entry.image.model_copy(update={"ip_adapters": known, **more})
    return entry.model_copy(update={"image": image})


class Drawing:
    """A model with IP-Adapters, and its entry."""

    def __init__(self, entry: Model, folder: Path, *, is_fused: bool = False) -> None:
        self.entry = entry
        self.preparer = preparer_for(entry, folder)
        model = model_for(entry, folder, "cpu")
        assert isinstance(model, ImageModel)
        self.model = model
        self.model.setup()
        if is_fused:
            pipeline: Any = self.model._main
            pipeline.fuse_qkv_projections()

    def after(
        self, value: ImageInput, name: str, image: Blob = PICTURE, scale: float = 1.0
    ) -> ImageInput:
        version = self.entry.image.ip_adapters[name].version
        return msgspec.structs.replace(
            value, ip_adapter=IpAdapterInput(name, version, image, scale)
        )

    def together(self, *values: ImageInput) -> list[np.ndarray]:
        return drawn(self.model, self.preparer, values)

    def alone(self, value: ImageInput) -> np.ndarray:
        return self.together(value)[0]

    def check(self, *values: ImageInput) -> list[np.ndarray]:
        """Checks that images are the same whether drawn in a batch or individually.

        Returns the individual images.
        """
        alone = [self.alone(value) for value in values]
        for value, one, other in zip(values, self.together(*values), alone, strict=True):
            assert np.abs(one - other).max() <= 1, value
        return alone


@pytest.fixture(scope="session")
def folders(family: TinyPipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ip")
    return {
        name: write(folder / name, family.folder, seed, is_plus=name == "plus")
        for seed, name in enumerate(("plain", "plus"))
    }


@pytest.fixture(scope="session")
def drawing(catalog: Catalog, family: TinyPipeline, folders: dict[str, Path]) -> Drawing:
    return Drawing(entry_with(catalog.default("image"), folders), family.folder)


def test_images_with_and_without_ip_adapters_are_drawn_together_as_alone(
    drawing: Drawing, family: TinyPipeline
) -> None:
    """Varies the number of reference images, the scales, sources and masks."""
    after = drawing.after
    values = [
        GUIDED,
        after(GUIDED, "plain"),
        after(GUIDED, "plain", scale=0.3),
        after(GUIDED, "plain", OTHER_PICTURE),
        after(GUIDED, "plus"),
        after(GUIDED, "plain", scale=0.0),
        after(msgspec.structs.replace(GUIDED, guidance_scale=1.0), "plus", OTHER_PICTURE),
        after(msgspec.structs.replace(FROM_IMAGE, steps=8, guidance_scale=3.0), "plain"),
        after(msgspec.structs.replace(MASKED, steps=5, guidance_scale=3.0), "plus"),
        *OTHERS,
    ]
    alone = drawing.check(*values)
    for first, second in ((0, 1), (1, 2), (1, 3), (1, 4), (2, 3)):
        assert np.abs(alone[first] - alone[second]).mean() > 0.5, (first, second)
    assert np.array_equal(alone[0], alone[5]), "a scale of 0 changes nothing"
    (usual,) = drawn(drawing.model, family.preparer, [GUIDED])
    assert np.array_equal(alone[0], usual)


def test_images_without_an_ip_adapter_are_those_of_a_model_without_any(
    drawing: Drawing, family: TinyPipeline
) -> None:
    assert isinstance(family.model, ImageModel)
    values = [GUIDED, *OTHERS]
    for value in values:
        # Prompts are encoded together too, unless they are cached.
        for model in (family.model, drawing.model):
            drawn(model, family.preparer, [value])
    usual = drawn(family.model, family.preparer, values)
    # Images of the same size share a call, so both calls have the same number of images. Any
    # difference is due to rounding in libraries that choose their thread count based on machine
    # load.
    for one, other in zip(drawing.together(*values), usual, strict=True):
        assert np.abs(one - other).max() <= 1


@lru_cache(maxsize=4)
def plain_with(folder: Path, ip_adapter: Path) -> Any:
    """A folder's pipeline with an IP-Adapter, as diffusers loads them."""
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.load_ip_adapter(
        str(ip_adapter), subfolder="", weight_name=WEIGHT_NAME, local_files_only=True
    )
    return pipeline


def by_diffusers(drawing: Drawing, folder: Path, ip_adapter: Path, value: ImageInput) -> np.ndarray:
    """The image that diffusers' pipeline draws on its own with an IP-Adapter."""
    pipeline = plain_with(folder, ip_adapter)
    more: dict[str, Any] = {"width": value.width, "height": value.height}
    if value.image is not None:
        pipeline = diffusers.AutoPipelineForImage2Image.from_pipe(pipeline)
        more = {"image": opened(value.image), "strength": value.strength}
    assert value.ip_adapter is not None
    pipeline.set_ip_adapter_scale(value.ip_adapter.scale)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = drawing.model._schedulers.create(value.scheduler)
    image = pipeline(
        value.prompt,
        ip_adapter_image=opened(value.ip_adapter.image),
        num_inference_steps=value.steps,
        guidance_scale=value.guidance_scale,
        generator=torch.Generator().manual_seed(value.seed),
        **more,
    ).images[0]
    return np.asarray(image).astype(int)


def opened(blob: Blob) -> Image.Image:
    return Image.open(io.BytesIO(blob.data or b""))


@pytest.mark.parametrize("kind", ["plain", "plus"])
@pytest.mark.parametrize(
    "value",
    [
        GUIDED,
        msgspec.structs.replace(GUIDED, guidance_scale=1.0, scheduler="euler"),
        msgspec.structs.replace(FROM_IMAGE, steps=8, guidance_scale=3.0),
    ],
    ids=["text", "unguided", "image"],
)
def test_images_are_those_of_plain_diffusers(
    drawing: Drawing, family: TinyPipeline, folders: dict[str, Path], kind: str, value: ImageInput
) -> None:
    asked = drawing.after(value, kind, OTHER_PICTURE, scale=0.7)
    theirs = by_diffusers(drawing, family.folder, folders[kind], asked)
    ours = drawing.alone(asked)
    assert np.abs(ours - theirs).max() <= 1
    assert np.abs(ours - drawing.alone(value)).mean() > 0.5


def test_image_of_a_request_is_encoded_once(drawing: Drawing) -> None:
    calls: list[int] = []
    encoder = drawing.model._ip_adapters._adapters["plain"].encoder
    hook = encoder.register_forward_hook(lambda *_: calls.append(1))
    asked = drawing.after(GUIDED, "plain", as_png(Image.new("RGB", (40, 40), (9, 99, 200))))
    try:
        drawing.together(*(msgspec.structs.replace(asked, seed=seed) for seed in range(3)))
    finally:
        hook.remove()
    assert len(calls) == 1


def test_other_images_cost_the_same(drawing: Drawing) -> None:
    plain, guided = drawing.preparer.prepare([TEXT, drawing.after(TEXT, "plain")])
    assert isinstance(plain, PreparedImage)
    assert isinstance(guided, PreparedImage)
    assert (guided.length, guided.room) == (plain.length, plain.room)


def test_it_goes_with_adapters_and_controls(
    catalog: Catalog, family: TinyPipeline, folders: dict[str, Path], tmp_path: Path
) -> None:
    plain: Any = diffusers.DiffusionPipeline.from_pretrained(family.folder, local_files_only=True)
    layers = lora_files.chosen_layers(plain, texts=False)
    weights = lora_files.random_weights(layers, 3, rank=4)
    file = lora_files.write(tmp_path / "a.safetensors", lora_files.FORMATS["diffusers"](weights))
    usual = catalog.default("image")
    net = write_control(tmp_path / "depth", family.folder, 5)
    more = {"controls": {"depth": Control(source=f"local:{net}")}}
    entry = entry_with(usual, folders, **more)
    drawer = Drawer(entry, family.folder, {"ink": Adapter(source=f"local:{file}")})
    version = entry.image.ip_adapters["plain"].version
    after = msgspec.structs.replace(
        GUIDED, ip_adapter=IpAdapterInput("plain", version, PICTURE, 0.8)
    )
    with_all = msgspec.structs.replace(
        drawer.with_adapter(after, "ink", 0.9),
        control=ControlInput("depth", "", OTHER_PICTURE, 0.5),
    )
    values = [GUIDED, after, drawer.with_adapter(after, "ink", 0.9), with_all]
    alone = [drawer.alone(value) for value in values]
    results = drawer.run(*((0, value) for value in values))
    for slot, one in enumerate(alone):
        image: Any = results[slot]
        shown = np.asarray(opened(image.image).convert("RGB")).astype(int)
        assert np.abs(shown - one).max() <= 1, slot
    for first, second in ((0, 1), (1, 2), (2, 3)):
        assert np.abs(alone[first] - alone[second]).mean() > 0.3, (first, second)
    plain.load_lora_weights(file, adapter_name="ink")
    plain.set_adapters(["ink"], [0.9])
    plain.load_ip_adapter(
        str(folders["plain"]), subfolder="", weight_name=WEIGHT_NAME, local_files_only=True
    )
    plain.set_ip_adapter_scale(0.8)
    plain.set_progress_bar_config(disable=True)
    plain.scheduler = drawer.model._schedulers.create(GUIDED.scheduler)
    theirs = plain(
        GUIDED.prompt,
        ip_adapter_image=opened(PICTURE),
        num_inference_steps=GUIDED.steps,
        guidance_scale=GUIDED.guidance_scale,
        generator=torch.Generator().manual_seed(GUIDED.seed),
        width=GUIDED.width,
        height=GUIDED.height,
    ).images[0]
    assert np.abs(alone[2] - np.asarray(theirs).astype(int)).max() <= 1


@pytest.mark.parametrize("choice", ["deep_cache", "guidance_stop", "fused"])
def test_it_goes_with_shortcuts(
    catalog: Catalog, family: TinyPipeline, folders: dict[str, Path], choice: str
) -> None:
    """It also works with the fused projections that GPUs use."""
    choices: dict[str, dict[str, Any]] = {
        "deep_cache": {"deep_cache": DeepCacheSettings(cache_interval=2)},
        "guidance_stop": {"guidance_stop": 0.5},
        "fused": {},
    }
    more = choices[choice]
    entry = entry_with(catalog.default("image"), folders, **more)
    drawing = Drawing(entry, family.folder, is_fused=choice == "fused")
    values = [GUIDED, drawing.after(GUIDED, "plain"), drawing.after(GUIDED, "plus", OTHER_PICTURE)]
    alone = drawing.check(*values, *OTHERS)
    for first, second in ((0, 1), (1, 2)):
        assert np.abs(alone[first] - alone[second]).mean() > 0.5, (first, second)


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is in no extra but gpu"
)
# torchao loads GPU kernels and warns if the machine has no GPU.
@pytest.mark.filterwarnings("default")
def test_int8_draws_as_the_model_in_full_precision(
    catalog: Catalog, drawing: Drawing, family: TinyPipeline, folders: dict[str, Path]
) -> None:
    entry = entry_with(catalog.default("image"), folders)
    eight = Drawing(entry.model_copy(update={"precision": "int8"}), family.folder)
    asked = eight.after(GUIDED, "plain")
    both = eight.check(GUIDED, asked)
    assert np.abs(both[1] - both[0]).mean() > 0.5
    assert np.abs(both[1] - drawing.alone(asked)).mean() < np.abs(both[1] - both[0]).mean()


@pytest.mark.anyio
async def test_a_model_process_draws_with_ip_adapters(
    drawing: Drawing, family: TinyPipeline
) -> None:
    """The entry and the items reach the process, which draws the same images as this one."""
    values = [GUIDED, drawing.after(GUIDED, "plain", scale=0.5)]
    ended: dict[int, Any] = {}

    def keep(message: StepMessage) -> None:
        if isinstance(message, ItemEnded):
            (ended[message.slot],) = message.done.results

    hosted = HostedModel(drawing.entry, family.folder)
    async with ModelPool([hosted], device="cpu", processes=1) as pool:
        items = [prepared(drawing.preparer, value) for value in values]
        await pool.processes[0].run_steps(items, timeout_s=START_LIMIT_S, on_message=keep)
    for slot, one in enumerate(drawing.together(*values)):
        shown = np.asarray(opened(ended[slot].image).convert("RGB")).astype(int)
        assert np.abs(shown - one).max() <= 1, slot


def wrong_file(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file that can't be used, along with the reason."""
    layers = {key: one for key, one in tensors.items() if key.startswith("ip_adapter.")}
    if name == "FaceID":
        width = next(iter(layers.values())).shape[1]
        return layers | {"image_proj.norm.weight": torch.ones(width)}
    if name == "layers":
        return {key: one for key, one in tensors.items() if not key.startswith("ip_adapter.1.")}
    if name == "encoder":
        return tensors | {"image_proj.proj.weight": tensors["image_proj.proj.weight"][:, :20]}
    return layers


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FaceID", "FaceID is not supported because it requires detecting faces"),
        ("layers", "trained for a different model: 1.to_k_ip.weight"),
        ("encoder", "does not fit"),
        ("projection", "must have only image_proj"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path, name: str, reason: str
) -> None:
    folder = write(tmp_path / "ip", tiny_folder, 1)
    tensors = ip_adapter_files.tensors_for(tiny_folder, 1)
    made = {key: one.contiguous() for key, one in wrong_file(name, tensors).items()}
    save_file(made, folder / WEIGHT_NAME)
    refuses(entry_with(catalog.default("image"), {"style": folder}), tiny_folder, reason)


def refuses(entry: Model, folder: Path, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        model_for(entry, folder, "cpu").setup()
    assert caught.value.field == "image.ip_adapters.style"


def test_other_models_digests_and_places_are_refused(
    catalog: Catalog, tiny_folder: Path, tiny_xl_folder: Path, tmp_path: Path
) -> None:
    usual = catalog.default("image")
    of_xl = write(tmp_path / "xl", tiny_xl_folder, 1)
    refuses(entry_with(usual, {"style": of_xl}), tiny_folder, "trained for a different model")
    refuses(entry_with(usual, {"style": tiny_folder}), tiny_folder, "is not a file")
    refuses(entry_with(usual, {"style": tmp_path / "none"}), tiny_folder, "is not a folder")
    folder = write(tmp_path / "right", tiny_folder, 1)
    digest = ip_adapter_files.digest_of(folder / WEIGHT_NAME)
    for given, reason in (
        (digest, ""),
        ("sha256:" + "0" * 64, f"its digest is {digest}; expected"),
    ):
        one = IpAdapter(source=f"local:{folder}", weight_name=WEIGHT_NAME, digest=given)
        image = usual.image.model_copy(update={"ip_adapters": {"style": one}})
        entry = usual.model_copy(update={"image": image})
        if reason:
            refuses(entry, tiny_folder, reason)
        else:
            model_for(entry, tiny_folder, "cpu").setup()
    ip_adapter_files.resized(folder, 0)
    refuses(entry_with(usual, {"style": folder}), tiny_folder, "image_size must be from 1")
    (folder / WEIGHT_NAME).write_bytes(b"no tensors")
    ip_adapter_files.resized(folder, 32)
    refuses(entry_with(usual, {"style": folder}), tiny_folder, "it is not valid safetensors")
    (folder / "image_encoder" / "config.json").unlink()
    refuses(entry_with(usual, {"style": folder}), tiny_folder, "does not specify the image_size")


def test_files_of_ip_adapters_are_weights_of_their_model(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "ip", tiny_folder, 1)
    entry = entry_with(catalog.default("image"), {"style": folder})
    found = WORKER_TASKS["image"].more_weights(entry)
    assert found == (folder / WEIGHT_NAME, folder / "image_encoder")
