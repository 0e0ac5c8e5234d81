"""IP-Adapters without a model: catalog entries, and the part of an image that encoders see."""

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from shared.errors import BadInput, ModelFailed
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from shared.models.image_entry import ImageDefaults, IpAdapter
from shared.models.tasks.image import ImageInput, ImagesInput, IpAdapterInput
from workers.models.base import PreparedImage
from workers.models.image.preprocessing import ImagePreparer

STYLE = IpAdapter(source="local:a", weight_name="a.safetensors")
SIDE_PX = 24
PREPARER = ImagePreparer(
    ImageDefaults(ip_adapters={"style": STYLE}), is_stepped=True, sides_px={"style": SIDE_PX}
)


def png(image: Image.Image) -> Blob:
    data = io.BytesIO()
    image.save(data, "PNG")
    return Blob("image/png", data.getvalue())


GRAY = png(Image.new("RGB", (32, 32), (99, 99, 99)))


def drawing(chosen: IpAdapterInput) -> ImageInput:
    return ImageInput("a", 64, 48, 4, 2.0, 1, "ddim", ip_adapter=chosen)


@pytest.mark.parametrize("size", [(96, 24), (24, 96), (12, 48), (240, 60), (24, 24)])
def test_encoders_read_the_middle_of_an_image(size: tuple[int, int]) -> None:
    """The middle is red, and the rest is blue."""
    image = Image.new("RGB", size, (0, 0, 255))
    short = min(size)
    left, above = (size[0] - short) // 2, (size[1] - short) // 2
    image.paste((255, 0, 0), (left, above, left + short, above + short))
    given = IpAdapterInput("style", STYLE.version, png(image), 0.5)
    (item,) = PREPARER.prepare([drawing(given)])
    assert isinstance(item, PreparedImage), item
    assert (item.ip_adapter, item.ip_adapter_scale) == ("style", 0.5)
    shown = np.frombuffer(item.ip_adapter_pixels, np.uint8).reshape(SIDE_PX, SIDE_PX, 3)
    inner = shown[2:-2, 2:-2]
    assert (inner == (255, 0, 0)).all()


def test_they_read_no_more_of_a_long_line() -> None:
    """Scaled to the encoder's height, the whole line would not fit in memory."""
    line = Image.new("RGB", (1_000_000, 1), (9, 9, 9))
    line.paste((200, 0, 0), (499_980, 0, 500_020, 1))
    given = IpAdapterInput("style", STYLE.version, png(line), 1.0)
    (item,) = PREPARER.prepare([drawing(given)])
    assert isinstance(item, PreparedImage), item
    assert item.ip_adapter_pixels == bytes((200, 0, 0)) * SIDE_PX**2


@pytest.mark.parametrize(
    ("chosen", "kind", "field"),
    [
        (IpAdapterInput("other", STYLE.version, GRAY, 1.0), ModelFailed, "ip_adapter"),
        (IpAdapterInput("style", "0" * 16, GRAY, 1.0), ModelFailed, "ip_adapter"),
        (
            IpAdapterInput("style", STYLE.version, Blob("image/png", b"x"), 1.0),
            BadInput,
            "ip_adapter_image",
        ),
        (IpAdapterInput("style", STYLE.version, GRAY, 2.5), BadInput, "ip_adapter_scale"),
        (IpAdapterInput("style", STYLE.version, GRAY, float("nan")), BadInput, "ip_adapter_scale"),
    ],
    ids=["name", "version", "image", "scale", "nan"],
)
def test_preparer_refuses_by_name(chosen: IpAdapterInput, kind: type, field: str) -> None:
    (refused,) = PREPARER.prepare([drawing(chosen)])
    assert isinstance(refused, kind), refused
    assert isinstance(refused, BadInput | ModelFailed)
    assert refused.field == field


def test_a_drawing_that_is_enlarged_keeps_its_ip_adapter() -> None:
    given = drawing(IpAdapterInput("style", STYLE.version, GRAY, 0.5))
    run = ImagesInput(given, [given.seed], is_repeatable=True, upscale=2)
    (read,) = msgspec.json.decode(msgspec.json.encode(run), type=ImagesInput).images
    assert read == given


def entry_of(**fields: Any) -> dict[str, Any]:
    return {
        "ip_adapters": {"style": {"source": "local:a", "weight_name": "a.safetensors"} | fields}
    }


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (entry_of(source="flow:a"), "pattern"),
        (entry_of(source="a"), "pattern"),
        (entry_of(weight_name="a.bin"), "pattern"),
        (entry_of(weight_name="models/a.safetensors"), "pattern"),
        (entry_of(subfolder="../a"), "pattern"),
        (entry_of(image_encoder_folder="/a"), "pattern"),
        (entry_of(digest="sha256:1"), "pattern"),
        (entry_of(scale=3), "less than or equal to 2"),
        (entry_of(revision=1.1), "must be quoted"),
        ({"ip_adapters": {"style": {"source": "local:a"}}}, "weight_name"),
    ],
    ids=lambda value: str(value)[16:66],
)
def test_catalog_refuses_by_name(catalog: Catalog, image: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        with_image(catalog, image)


def with_image(catalog: Catalog, image: dict[str, Any]) -> Model:
    entry = catalog.default("image").model_dump()
    return Model.model_validate(entry | {"image": entry["image"] | image})


def test_entry_has_its_sources_and_may_be_compiled(catalog: Catalog) -> None:
    model = with_image(
        catalog, entry_of(revision="2") | {"controls": {"style": {"source": "local:b"}}}
    )
    assert model.image.compile_mode == "auto"
    assert model.sources == {
        model.name: (model.source, model.revision),
        f"{model.name} style": ("local:b", "main"),
        f"{model.name} ip_adapter style": ("local:a", "2"),
    }


def test_version_changes_with_each_field_that_decides_results() -> None:
    changes: list[dict[str, Any]] = [
        {"source": "local:b"},
        {"revision": "2"},
        {"subfolder": "models"},
        {"weight_name": "b.safetensors"},
        {"image_encoder_folder": "other"},
        {"digest": f"sha256:{'0' * 64}"},
    ]
    usual = IpAdapter(source="local:a", weight_name="a.safetensors")
    others = [usual, *(usual.model_copy(update=change) for change in changes)]
    assert len({other.version for other in others}) == len(others)
    assert usual.model_copy(update={"scale": 0.5}).version == usual.version
