"""The images that guide a drawing, of any kind: those of ControlNets and of IP-Adapters.

Each kind has a module of its own. Endpoints know only this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from api.inputs.controls import CONTROL_FIELDS, CONTROL_IMAGE, check_control, prepare_control
from api.inputs.image_fields import ImageFields
from api.inputs.ip_adapters import (
    IP_ADAPTER_FIELDS,
    IP_ADAPTER_IMAGE,
    check_ip_adapter,
    prepare_ip_adapter,
)
from api.inputs.source_images import ImageCaller, SourceImages
from shared.catalog import Model
from shared.tasks.image import ImageInput

GUIDE_IMAGES = (CONTROL_IMAGE, IP_ADAPTER_IMAGE)
"""The fields that name their images. In forms they may be files."""


def guide_urls(body: ImageFields) -> dict[str, str]:
    """Returns where the images are, by the fields that say so."""
    named = {name: getattr(body, name) for name in GUIDE_IMAGES}
    return {name: url for name, url in named.items() if url is not None}


def check_guides(body: ImageFields, model: Model, *, files: Collection[str] = ()) -> None:
    """Validates the guides of a request for a model.

    `files`: the fields whose images came as files of a form.

    Raises:
        BadInput: the model has no such guide, or its image is missing.
    """
    check_control(body, model, has_picture=CONTROL_IMAGE in files)
    check_ip_adapter(body, model, has_picture=IP_ADAPTER_IMAGE in files)


async def with_guides(
    first: ImageInput,
    body: ImageFields,
    files: Mapping[str, bytes],
    size: tuple[int, int] | None,
    model: Model,
    caller: ImageCaller,
    images: SourceImages,
) -> ImageInput:
    """Returns an image with the guides of its request, which were checked.

    Args:
        first: the image without them.
        body: the fields.
        files: of the images, by their fields. Others may be among them.
        size: of the image to draw. None: as that of the control, if there is one.
        model: the model.
        caller: who asks.
        images: prepares images.

    Raises:
        BadInput: a file is not an image, or it is broken. Names its field.
    """
    if CONTROL_IMAGE in files:
        data = files[CONTROL_IMAGE]
        control, (width, height) = await prepare_control(body, data, size, model, caller, images)
        first = msgspec.structs.replace(first, width=width, height=height, control=control)
    if IP_ADAPTER_IMAGE in files:
        data = files[IP_ADAPTER_IMAGE]
        chosen = await prepare_ip_adapter(body, data, model, caller, images)
        first = msgspec.structs.replace(first, ip_adapter=chosen)
    return first


def show_guides(schema: dict[str, Any], models: Iterable[Model]) -> dict[str, Any]:
    """Returns the JSON Schema of a body for these models: only what they take is in it."""
    known = list(models)
    controls = sorted({name for model in known for name in model.image.controls})
    ip_adapters = sorted({name for model in known for name in model.image.ip_adapters})
    properties = dict(schema["properties"])
    for fields, names in ((CONTROL_FIELDS, controls), (IP_ADAPTER_FIELDS, ip_adapters)):
        if names:
            properties[fields[0]] = _named(properties[fields[0]], names)
        else:
            properties = {name: one for name, one in properties.items() if name not in fields}
    return schema | {"properties": properties}


def _named(field: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The schema of a field that has one of these names."""
    # Forms have no null.
    kinds = [kind | {"enum": names} for kind in field.get("anyOf", ())[:1]]
    return field | ({"anyOf": [*kinds, *field["anyOf"][1:]]} if kinds else {"enum": names})
