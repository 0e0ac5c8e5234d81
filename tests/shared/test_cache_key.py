"""Cache keys for results: they depend on everything that changes the result, and on nothing
else.
"""

from typing import Any

import msgspec
import pytest

from shared.errors import BadInput
from shared.models.blob import Blob, content_digest
from shared.models.catalog import Model
from shared.models.entry import Tolerance
from shared.models.image_entry import DeepCacheSettings, ImageDefaults
from shared.models.tasks import Input
from shared.models.tasks.embedding import TextInput, TokensInput
from shared.models.tasks.image import ChosenAdapter, ControlInput, ImageInput, IpAdapterInput
from shared.stores.cache import cache_key

MODEL = Model.model_validate(
    {
        "name": "mini",
        "task": "embedding",
        "source": "local:mini",
        "dimensions": 4,
        "batch": {"max_tokens": 64},
    }
)
PNG = Blob("image/png", data=b"pixels")


def drawing(**params: Any) -> ImageInput:
    usual: dict[str, Any] = {
        "prompt": "a boat",
        "width": 64,
        "height": 64,
        "steps": 4,
        "guidance_scale": 7.5,
    }
    return ImageInput(**usual | {"seed": 3, "scheduler": "ddim", "strength": 0.5} | params)


def test_key_changes_with_each_number_of_a_shortcut() -> None:
    shortcuts: list[dict[str, Any]] = [
        {},
        {"deep_cache": DeepCacheSettings(cache_interval=3)},
        {"deep_cache": DeepCacheSettings(cache_interval=4)},
        {"deep_cache": DeepCacheSettings(cache_interval=4, cache_branch_id=1)},
        {"guidance_stop": 0.4},
        {"guidance_stop": 0.5},
    ]
    models = [MODEL.model_copy(update={"image": ImageDefaults(**one)}) for one in shortcuts]
    assert len({cache_key(model, drawing(), "t") for model in models}) == len(shortcuts)
    assert cache_key(models[0], drawing(), "t") == cache_key(MODEL, drawing(), "t")


def test_key_is_256_bits_and_repeatable() -> None:
    key = cache_key(MODEL, TextInput("a cat"), "t")
    assert len(bytes.fromhex(key)) == 32
    assert key == cache_key(MODEL, TextInput("a cat"), "t")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "mini2"},
        {"revision": "2"},
        {"source": "local:other"},
        {"precision": "fp32"},
        {"precision": "int8"},
        {"tolerance": Tolerance(cosine=0.98)},
        {"dimensions": 8},
        {"image": ImageDefaults(deep_cache=DeepCacheSettings())},
        {"image": ImageDefaults(guidance_stop=0.5)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_key_changes_with_model(change: dict[str, object]) -> None:
    other = MODEL.model_copy(update=change)
    assert cache_key(other, TextInput("a cat"), "t") != cache_key(MODEL, TextInput("a cat"), "t")


def test_backends_within_the_tolerance_share_results() -> None:
    other = MODEL.model_copy(update={"backend": "onnx", "tolerance": Tolerance(psnr_db=40)})
    assert cache_key(other, TextInput("a cat"), "t") == cache_key(MODEL, TextInput("a cat"), "t")


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a boat "},
        {"negative_prompt": "fog"},
        {"width": 72},
        {"height": 72},
        {"steps": 5},
        {"guidance_scale": 7.6},
        {"seed": 4},
        {"scheduler": "euler"},
        {"clip_skip": 1},
        {"guidance_rescale": 0.5},
        {"image": PNG},
    ],
    ids=lambda change: next(iter(change)),
)
def test_key_changes_with_image_params(change: dict[str, object]) -> None:
    assert cache_key(MODEL, drawing(**change), "t") != cache_key(MODEL, drawing(), "t")


def test_key_covers_source_image_and_strength() -> None:
    drawn_from = [
        drawing(image=image, strength=strength)
        for image in (
            PNG,
            Blob("image/png", data=b"others"),
            Blob("image/png", object_key="inputs/1.png"),
        )
        for strength in (0.5, 0.6)
    ]
    assert len({cache_key(MODEL, input, "t") for input in drawn_from}) == len(drawn_from)


def test_key_covers_the_mask() -> None:
    other = Blob("image/png", data=b"others")
    masked = [drawing(image=PNG, strength=1.0, mask=mask) for mask in (None, PNG, other)]
    assert len({cache_key(MODEL, input, "t") for input in masked}) == len(masked)


def test_key_covers_the_adapter_its_file_and_its_scale() -> None:
    chosen = [
        None,
        ChosenAdapter("ink", "sha256:1", 1.0),
        ChosenAdapter("oil", "sha256:1", 1.0),
        ChosenAdapter("ink", "sha256:2", 1.0),
        ChosenAdapter("ink", "sha256:1", 0.5),
    ]
    drawn = [drawing(adapter=one, image=image) for one in chosen for image in (None, PNG)]
    assert len({cache_key(MODEL, input, "t") for input in drawn}) == len(drawn)


def test_key_covers_the_control() -> None:
    usual = ControlInput("canny", "a", PNG, 1.0)
    changes: list[dict[str, Any]] = [
        {},
        {"name": "depth"},
        {"digest": "b"},
        {"image": Blob("image/png", data=b"others")},
        {"scale": 0.9},
        {"start": 0.1},
        {"end": 0.9},
    ]
    controlled = [drawing(control=msgspec.structs.replace(usual, **change)) for change in changes]
    several = [usual, msgspec.structs.replace(usual, name="depth")]
    inputs = [
        drawing(),
        drawing(image=PNG),
        drawing(image=PNG, mask=PNG),
        drawing(image=PNG, control=usual),
        *controlled,
        *(drawing(control=usual, more_controls=(other,)) for other in several),
        drawing(control=several[1], more_controls=(usual,)),
    ]
    assert len({cache_key(MODEL, input, "t") for input in inputs}) == len(inputs)
    stored = drawing(image=PNG, control=usual)
    digest = content_digest(b"pixels")
    moved = [Blob("image/png", object_key=name, digest=digest) for name in ("1", "2")]
    there = stored.with_sources(moved)
    assert there.sources == tuple(moved)
    assert cache_key(MODEL, there, "t") == cache_key(MODEL, stored, "t")


def test_key_covers_the_ip_adapter() -> None:
    usual = IpAdapterInput("style", "a", PNG, 1.0)
    other = Blob("image/png", data=b"others")
    changes: list[dict[str, Any]] = [{}, {"name": "face"}, {"version": "b"}, {"image": other}]
    changes.append({"scale": 0.9})
    control = ControlInput("style", "a", PNG, 1.0)
    more = (control,)
    inputs = [
        drawing(),
        drawing(control=control),
        drawing(control=control, ip_adapter=usual),
        drawing(image=PNG, ip_adapter=usual),
        *(drawing(ip_adapter=msgspec.structs.replace(usual, **change)) for change in changes),
    ]
    assert len({cache_key(MODEL, input, "t") for input in inputs}) == len(inputs)
    stored = drawing(image=PNG, mask=PNG, control=control, more_controls=more, ip_adapter=usual)
    digest = content_digest(b"pixels")
    moved = [Blob("image/png", object_key=name, digest=digest) for name in "12345"]
    there = stored.with_sources(moved)
    assert there.sources == tuple(moved)
    assert there.ip_adapter is not None
    assert [control.image for control in there.controls] == moved[2:4]
    assert there.ip_adapter.image == moved[4]
    assert cache_key(MODEL, there, "t") == cache_key(MODEL, stored, "t")


def test_key_ignores_what_changes_no_pixel() -> None:
    without_source = drawing(strength=0.9)
    whole_number = drawing(guidance_scale=7)
    assert cache_key(MODEL, without_source, "t") == cache_key(MODEL, drawing(), "t")
    assert cache_key(MODEL, whole_number, "t") == cache_key(MODEL, drawing(guidance_scale=7.0), "t")


def test_key_tells_text_from_tokens() -> None:
    inputs: list[Input] = [
        TextInput("1"),
        TokensInput([1]),
        TokensInput([1, 2]),
        TokensInput([12]),
        TextInput(""),
    ]
    assert len({cache_key(MODEL, input, "t") for input in inputs}) == len(inputs)


def test_key_scope_decides_about_tenant() -> None:
    common = MODEL.model_copy(update={"cache": MODEL.cache.model_copy(update={"scope": "global"})})
    text = TextInput("a cat")
    assert cache_key(MODEL, text, "a") != cache_key(MODEL, text, "b"), (
        "the scope is the tenant's unless said otherwise"
    )
    assert cache_key(common, text, "a") == cache_key(common, text, "b")


def test_key_refuses_lone_surrogate() -> None:
    with pytest.raises(BadInput, match="Unicode"):
        cache_key(MODEL, TextInput("\ud800"), "t")
