"""Families with flow-matching transformers: text, image and mask, individually and in a batch.

Each family has a test module that writes a tiny pipeline with its real classes. Properties shared
by all families are tested for each of them.
"""

import importlib
import io
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from shared.errors import BadInput, ConfigurationError
from shared.models.catalog import Catalog, Model
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.plain_diffusers import plain_pipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels, png
from tests.workers.models.test_image_drawing import drawn, joining
from tests.workers.models.test_image_masks import as_png, box, source_pixels
from tests.workers.models.test_image_steps import prepared, run
from workers.models.device import Device
from workers.models.image.compilation import compile_parts, only_what_is_compiled
from workers.models.image.model import ImageModel
from workers.tasks import WORKER_TASKS, preparer_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

FLOWS = {"stable_diffusion_3": {"negative_prompt", "clip_skip"}, "flux": set[str]()}
"""Each family's options, keyed by the test module that writes its pipeline."""
OWN = msgspec.structs.replace(TEXT, scheduler="default", steps=4, guidance_scale=4.0)
OWN_FROM_IMAGE = msgspec.structs.replace(OWN, image=FROM_IMAGE.image, strength=0.6)
MASK = box(16, 16, 48, 48)
MASKED = msgspec.structs.replace(OWN_FROM_IMAGE, mask=as_png(MASK))


def entry_of(catalog: Catalog, **changes: Any) -> Model:
    entry = catalog.default("image")
    image = entry.image.model_copy(update={"scheduler": "default"} | changes)
    return entry.model_copy(update={"image": image})


def loaded(entry: Model, folder: Path) -> TinyPipeline:
    model = ImageModel(entry, folder, Device("cpu", threads=1, memory_fraction=1.0))
    model.setup()
    return TinyPipeline(folder, preparer_for(entry, folder), model)


def write_tiny(module: str, folder: Path, shipped: Path, **options: Any) -> Path:
    tiny = importlib.import_module(f"tests.workers.models.tiny_{module}")
    written: Path = tiny.write_folder(folder, shipped, **options)
    return written


@pytest.fixture(scope="module", params=FLOWS)
def flow(
    request: pytest.FixtureRequest,
    catalog: Catalog,
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> TinyPipeline:
    module = request.param
    folder = write_tiny(module, tmp_path_factory.mktemp(module), tiny_folder)
    return loaded(entry_of(catalog), folder)


def stepped(tiny: TinyPipeline) -> ImageModel:
    assert isinstance(tiny.model, ImageModel)
    return tiny.model


def module_of(tiny: TinyPipeline) -> str:
    is_flux = isinstance(stepped(tiny)._main, diffusers.FluxPipeline)
    return "flux" if is_flux else "stable_diffusion_3"


def options_of(tiny: TinyPipeline) -> set[str]:
    return FLOWS[module_of(tiny)]


def plain(folder: Path, value: ImageInput) -> np.ndarray:
    """The image drawn by the pipeline itself, which does not paste the source outside a mask."""
    kind: Any = diffusers.AutoPipelineForText2Image
    given: dict[str, Any] = {}
    if value.image is not None:
        kind = diffusers.AutoPipelineForImage2Image
        source = Image.open(io.BytesIO(value.image.data or b"")).convert("RGB")
        given = {"image": source, "strength": value.strength}
    if value.mask is not None:
        kind = diffusers.AutoPipelineForInpainting
        given["mask_image"] = Image.open(io.BytesIO(value.mask.data or b""))
    if value.negative_prompt:
        given["negative_prompt"] = value.negative_prompt
    if value.clip_skip:
        given["clip_skip"] = value.clip_skip
    pipeline = plain_pipeline(kind, folder)
    latents = pipeline(
        value.prompt,
        width=value.width,
        height=value.height,
        num_inference_steps=value.steps,
        guidance_scale=value.guidance_scale,
        generator=torch.Generator().manual_seed(value.seed),
        output_type="latent",
        **given,
    ).images
    if latents.ndim == 3:
        size = value.height, value.width
        latents = pipeline._unpack_latents(latents, *size, pipeline.vae_scale_factor)
    config = pipeline.vae.config
    # Stable Diffusion 3's mask pipeline omits the shift when it decodes.
    with torch.inference_mode():
        decoded = pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
    drawn = pipeline.image_processor.postprocess(decoded, output_type="pil")[0]
    return np.asarray(drawn).astype(int)


def joined(tiny: TinyPipeline, values: Sequence[ImageInput]) -> list[np.ndarray]:
    return [pixels(result) for result in joining(tiny.model, tiny.preparer, values)]


def far(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one - other).max())


@pytest.mark.parametrize("value", [OWN, OWN_FROM_IMAGE], ids=["text", "image"])
@pytest.mark.parametrize(
    "change",
    [{}, {"guidance_scale": 1.0}, {"width": 96, "height": 48}, {"scheduler": "euler"}],
    ids=str,
)
def test_pixels_are_those_of_plain_diffusers(
    flow: TinyPipeline, value: ImageInput, change: dict[str, Any]
) -> None:
    """The images are drawn as one batch, and in a batch that they join one by one."""
    value = msgspec.structs.replace(value, **change)
    if value.image is not None:
        value.image = png(value.width, value.height)
    inputs = [msgspec.structs.replace(value, seed=seed) for seed in (1, 2)]
    expected = [plain(flow.folder, value) for value in inputs]
    assert far(expected[0], expected[1]) > 8
    whole = [pixels(result) for result in drawn(flow.model, flow.preparer, inputs)]
    for ours in (whole, joined(flow, inputs)):
        for mine, other in zip(ours, expected, strict=True):
            assert far(mine, other) <= 1


@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_masked_pixels_are_those_of_plain_diffusers(flow: TinyPipeline, strength: float) -> None:
    value = msgspec.structs.replace(MASKED, strength=strength)
    (image,) = joined(flow, [value])
    inside = np.asarray(MASK) > 0
    assert np.array_equal(image[~inside], source_pixels(value)[~inside])
    assert far(image[inside], plain(flow.folder, value)[inside]) <= 1


def test_any_company_leaves_the_pixels_as_they_are(flow: TinyPipeline) -> None:
    """Varies text, image, mask, steps, sizes and scales, and when the other images join."""
    replace = msgspec.structs.replace
    arrivals = [
        (0, replace(OWN, seed=1, steps=7)),
        (1, replace(OWN, seed=2, steps=3, guidance_scale=1.0)),
        (2, replace(OWN_FROM_IMAGE, seed=3, steps=5)),
        (2, replace(MASKED, seed=4, steps=5)),
        (3, replace(OWN, seed=5, width=96, height=48, prompt="a house", guidance_scale=2.0)),
    ]
    if "negative_prompt" in options_of(flow):
        arrivals.append((3, replace(OWN, seed=6, negative_prompt="fog")))
    results = run(stepped(flow), flow.preparer, arrivals)
    for slot, (_, value) in enumerate(arrivals):
        result = results[slot]
        assert isinstance(result, ImageResult)
        alone = run(stepped(flow), flow.preparer, [(0, value)])[0]
        assert isinstance(alone, ImageResult)
        assert far(pixels(result), pixels(alone)) <= 1, value
        assert result.pixel_steps == alone.pixel_steps


@pytest.mark.parametrize(
    "option",
    [{"negative_prompt": "fog"}, {"clip_skip": 1}, {"guidance_rescale": 0.5}],
    ids=lambda option: next(iter(option)),
)
def test_an_option_has_its_effect_or_is_refused_by_name(
    flow: TinyPipeline, option: dict[str, Any]
) -> None:
    (name,) = option
    value = msgspec.structs.replace(OWN, **option)
    if name in options_of(flow):
        (mine,), (without,) = joined(flow, [value]), joined(flow, [OWN])
        assert far(mine, plain(flow.folder, value)) <= 1
        assert far(mine, without) > 1
        return
    with pytest.raises(BadInput, match="is not supported by this model; omit it") as caught:
        stepped(flow).admit(0, prepared(flow.preparer, value))
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"width": 72}, "width"),
        ({"height": 40}, "height"),
        ({"scheduler": "ddim"}, "scheduler"),
        ({"clip_skip": 12}, "clip_skip"),
    ],
    ids=str,
)
def test_what_the_transformer_can_not_draw_is_refused_alone(
    flow: TinyPipeline, change: dict[str, Any], field: str
) -> None:
    model = stepped(flow)
    model.admit(0, prepared(flow.preparer, OWN))
    with pytest.raises(BadInput) as caught:
        model.admit(1, prepared(flow.preparer, msgspec.structs.replace(OWN, **change)))
    assert caught.value.field == field
    assert model.progress().keys() == {0}
    model.drop(0)


@pytest.mark.parametrize("change", [{"scheduler": "ddim"}, {"width": 72}], ids=str)
def test_defaults_that_the_model_can_not_draw_are_refused_at_start(
    flow: TinyPipeline, catalog: Catalog, change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(entry_of(catalog, **change), flow.folder)
    assert caught.value.field == f"image.{next(iter(change))}"


def test_prompts_are_encoded_once_and_their_lost_tokens_counted(flow: TinyPipeline) -> None:
    """The encoder with the longest input limit determines how many tokens are lost."""
    model = stepped(flow)
    encoders = [
        value
        for name, value in model._main.components.items()
        if name.startswith("text_encoder") and value is not None
    ]
    calls: list[int] = []
    hooks = [
        encoder.register_forward_hook(lambda module, given, output: calls.append(1))
        for encoder in encoders
    ]
    value = msgspec.structs.replace(OWN, prompt="a prompt that no other test has")
    joined(flow, [value])
    prompts = 2 if "negative_prompt" in options_of(flow) else 1
    assert len(calls) == prompts * len(encoders)
    joined(flow, [msgspec.structs.replace(value, seed=7)])
    assert len(calls) == prompts * len(encoders)
    for hook in hooks:
        hook.remove()
    pipeline = model._main
    tokenizer, most = (
        (pipeline.tokenizer_2, 512) if "flux" in module_of(flow) else (pipeline.tokenizer_3, 256)
    )
    long = msgspec.structs.replace(OWN, prompt="a " * 600)
    (result,) = joining(model, flow.preparer, [long])
    assert result.truncated_tokens == len(tokenizer(long.prompt, verbose=False)["input_ids"]) - most


def test_an_image_is_charged_for_the_steps_that_it_takes(flow: TinyPipeline) -> None:
    """With a strength of 0.6 and 4 steps, flow-matching pipelines run 3 steps."""
    model = stepped(flow)
    (result,) = joining(model, flow.preparer, [OWN_FROM_IMAGE])
    assert result.pixel_steps == 3 * 64 * 64
    model.admit(0, prepared(flow.preparer, OWN_FROM_IMAGE))
    assert model.progress() == {0: (0, 3)}
    model.step()
    image = model.image(0)
    assert image is not None
    assert len(image.pixels) == 3 * image.width * image.height
    model.drop(0)


def test_each_size_has_its_own_shift(
    flow: TinyPipeline, catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    """If the scheduler shifts by image size, large images stay noisy longer."""
    module = module_of(flow)
    options = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 3.0}
    folder = write_tiny(
        module, tmp_path, tiny_folder, **options, max_image_seq_len=64, base_image_seq_len=4
    )
    tiny = loaded(entry_of(catalog), folder)
    wide = msgspec.structs.replace(OWN, width=128, height=96, seed=3)
    values = [OWN, wide, msgspec.structs.replace(OWN_FROM_IMAGE, steps=5)]
    for mine, value in zip(joined(tiny, values), values, strict=True):
        assert far(mine, plain(folder, value)) <= 1
    model = stepped(tiny)
    for slot, value in enumerate((OWN, wide)):
        model.admit(slot, prepared(tiny.preparer, value))
    assert len(model.step().results) == 0
    small, large = (model._drawings[slot].pipeline.scheduler.timesteps for slot in (0, 1))
    assert (large[1:] > small[1:]).all()
    for slot in (0, 1):
        model.drop(slot)


def test_compiled_sizes_are_filled_up(catalog: Catalog, flow: TinyPipeline) -> None:
    """Three items are computed as if there were four, without the compiler."""
    entry = entry_of(catalog, compile="always")
    batch = entry.batch.model_copy(update={"max_items": 4})
    model = stepped(loaded(entry.model_copy(update={"batch": batch}), flow.folder))
    with torch.compiler.set_stance("force_eager"):
        model.warmup()
        rows: list[int] = []
        transformer = model._main.transformer
        forward = transformer.forward

        def counted(**named: Any) -> Any:
            rows.append(len(named["hidden_states"]))
            return forward(**named)

        transformer.forward = counted
        values = [msgspec.structs.replace(OWN, seed=seed, steps=3 + seed) for seed in range(3)]
        results = run(model, flow.preparer, [(0, value) for value in values])
    each = 2 if "negative_prompt" in options_of(flow) else 1
    assert set(rows) <= {each, 2 * each, 4 * each}
    for slot, value in enumerate(values):
        result = results[slot]
        assert isinstance(result, ImageResult)
        assert far(pixels(result), joined(flow, [value])[0]) <= 1


def test_steps_of_a_compiled_shape_run_nothing_eagerly(
    catalog: Catalog, flow: TinyPipeline
) -> None:
    """Dynamo and its guards are real, but the C++ compiler, which takes a minute, is left out."""
    torch._dynamo.reset()
    tiny = loaded(entry_of(catalog), flow.folder)
    pipeline = stepped(tiny)._main
    # All families share the VAE, which is compiled in test_compilation.py.
    compile_parts(pipeline.transformer, diffusers.AutoencoderKL(), shapes=2, backend="aot_eager")
    joined(tiny, [OWN])
    calls: list[int] = []
    # A compiled graph has no modules for a hook to see.
    pipeline.transformer.proj_out.register_forward_hook(
        lambda module, given, output: calls.append(len(output))
    )
    other = msgspec.structs.replace(OWN, seed=2, prompt="a house", steps=3, guidance_scale=5.0)
    with only_what_is_compiled():
        (mine,) = joined(tiny, [other])
        assert not calls
        joined(tiny, [msgspec.structs.replace(OWN, width=96)])
        assert calls
    assert far(mine, joined(flow, [other])[0]) <= 1


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("default")
def test_int8_is_for_the_blocks_and_draws_nearly_the_same(
    catalog: Catalog, flow: TinyPipeline
) -> None:
    entry = entry_of(catalog).model_copy(update={"precision": "int8"})
    tiny = loaded(entry, flow.folder)
    (mine,), (exact,) = joined(tiny, [OWN]), joined(flow, [OWN])
    error = np.square(mine - exact).mean()
    assert error > 0, "nothing was quantized"
    assert 10 * np.log10(255**2 / error) >= 30
    for name, module in stepped(tiny)._main.transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            is_plain = type(module.weight) is torch.nn.Parameter
            assert is_plain == ("transformer_blocks" not in name or ".norm" in name), name


@pytest.mark.parametrize("suffix", ["Img2ImgPipeline", "InpaintPipeline"])
def test_a_folder_may_name_any_pipeline_of_its_family(
    flow: TinyPipeline, catalog: Catalog, tmp_path: Path, suffix: str
) -> None:
    for part in flow.folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    index = json.loads((flow.folder / "model_index.json").read_text())
    name = index["_class_name"].removesuffix("Pipeline") + suffix
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    entry = entry_of(catalog)
    assert WORKER_TASKS["image"].computes_steps(entry, tmp_path)
    assert far(*(joined(tiny, [OWN])[0] for tiny in (flow, loaded(entry, tmp_path)))) <= 1


def test_a_folder_without_t5_draws_and_counts_the_tokens_of_clip(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_tiny("stable_diffusion_3", tmp_path, tiny_folder, has_t5=False)
    tiny = loaded(entry_of(catalog), folder)
    (mine,) = joined(tiny, [OWN])
    assert far(mine, plain(folder, OWN)) <= 1
    (result,) = joining(tiny.model, tiny.preparer, [msgspec.structs.replace(OWN, prompt="a " * 80)])
    tokenizer = stepped(tiny)._main.tokenizer
    assert result.truncated_tokens == 82 - tokenizer.model_max_length


def test_a_transformer_that_is_not_told_the_guidance_ignores_it(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    """FLUX.1 [schnell] is an example."""
    strong = msgspec.structs.replace(OWN, guidance_scale=50.0)
    for is_told in (False, True):
        folder = write_tiny("flux", tmp_path / str(is_told), tiny_folder, is_told_guidance=is_told)
        usual, other = joined(loaded(entry_of(catalog), folder), [OWN, strong])
        assert far(usual, plain(folder, OWN)) <= 1
        assert (far(usual, other) > 1) == is_told


def test_a_transformer_trained_with_masks_draws_as_plain_diffusers(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_tiny("stable_diffusion_3", tmp_path, tiny_folder, trained=True)
    tiny = loaded(entry_of(catalog), folder)
    tiny.model.warmup()
    (image,) = joined(tiny, [MASKED])
    inside = np.asarray(MASK) > 0
    assert far(image[inside], plain(folder, MASKED)[inside]) <= 1
    with pytest.raises(BadInput, match="within the mask"):
        stepped(tiny).admit(0, prepared(tiny.preparer, OWN))


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed:FutureWarning")
def test_a_family_that_no_code_names_draws_as_plain_diffusers(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    """Draws from text and images, in a batch, with the options in its signature."""
    folder = write_tiny("chroma", tmp_path, tiny_folder)
    named = [one for one in Path("workers").rglob("*.py") if "Chroma" in one.read_text("utf-8")]
    assert not named
    tiny = loaded(entry_of(catalog), folder)
    tiny.model.warmup()
    plain_of: dict[str, Any] = {
        "text": diffusers.ChromaPipeline,
        "image": diffusers.ChromaImg2ImgPipeline,
    }
    fog = msgspec.structs.replace(OWN, seed=3, negative_prompt="fog", steps=5)
    values = [OWN, fog, OWN_FROM_IMAGE]
    for mine, value in zip(joined(tiny, values), values, strict=True):
        pipeline = plain_pipeline(plain_of["text" if value.image is None else "image"], folder)
        given: dict[str, Any] = {"width": 64, "height": 64}
        if value.image is not None:
            source = Image.open(io.BytesIO(value.image.data or b"")).convert("RGB")
            given |= {"image": source, "strength": value.strength}
        drawn = pipeline(
            value.prompt,
            negative_prompt=value.negative_prompt or None,
            num_inference_steps=value.steps,
            guidance_scale=value.guidance_scale,
            generator=torch.Generator().manual_seed(value.seed),
            **given,
        ).images[0]
        assert far(mine, np.asarray(drawn).astype(int)) <= 1
    # In diffusers 0.42.1, the mask pipeline looks for a setting that Chroma does not have.
    with pytest.raises(BadInput, match="only draws from text or from an image"):
        stepped(tiny).admit(0, prepared(tiny.preparer, MASKED))
    with pytest.raises(BadInput, match="is not supported by this model; omit it") as caught:
        stepped(tiny).admit(
            0, prepared(tiny.preparer, msgspec.structs.replace(OWN, guidance_rescale=0.5))
        )
    assert caught.value.field == "guidance_rescale"
