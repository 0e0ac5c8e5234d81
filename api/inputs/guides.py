"""Image request fields, including the fields for guides: ControlNets and IP-Adapters.

Fields have the same names as in diffusers pipelines and Replicate models. `control` and
`ip_adapter` each name a catalog entry. image_draft.py prepares the images for both.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import Field, model_validator

from api.bodies import (
    MAX_PROMPT_CHARS,
    MAX_SEED,
    MAX_URL_CHARS,
    SCHEDULER_CHOICE,
    Body,
    ClipSkip,
    GuidanceRescale,
    SchedulerName,
    Upscale,
)
from api.errors import WrongField
from shared.errors import BadInput
from shared.models.catalog import Model
from shared.models.image_entry import (
    MAX_CONTROL_SCALE,
    MAX_IP_ADAPTER_SCALE,
    MAX_LORA_SCALE,
    MIN_LORA_SCALE,
)
from shared.models.image_interface import ImageMode, refuse_mode

CONTROL_IMAGE = "control_image"
_CONTROL_OPTIONS = (
    CONTROL_IMAGE,
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)
MORE_CONTROLS = "more_controls"
CONTROL_FIELDS = ("control", *_CONTROL_OPTIONS, MORE_CONTROLS)
MAX_MORE_CONTROLS = 3
"""Maximum number of controls in a request after the first one."""

IP_ADAPTER = "ip_adapter"
IP_ADAPTER_IMAGE = "ip_adapter_image"
_IP_ADAPTER_OPTIONS = (IP_ADAPTER_IMAGE, "ip_adapter_scale")
IP_ADAPTER_FIELDS = (IP_ADAPTER, *_IP_ADAPTER_OPTIONS)

GUIDE_IMAGES = (CONTROL_IMAGE, IP_ADAPTER_IMAGE)
"""Fields that contain an image for a ControlNet or IP-Adapter. In forms, they may be files."""


class ControlFields(Body):
    """ControlNet fields, which all image bodies have."""

    control: str | None = Field(
        None,
        max_length=64,
        description="Name of the model's ControlNet that guides the drawing.",
    )
    control_image: str | None = Field(
        None,
        description=(
            "The image for `control`, in any size: a base64 data: URI, an https URL, or the ID "
            "or URL of a file or result of this API."
        ),
    )
    controlnet_conditioning_scale: float | None = Field(
        None,
        ge=0,
        le=MAX_CONTROL_SCALE,
        description="Strength of `control`. Default: from the catalog, usually 1.",
    )
    control_guidance_start: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Fraction of the steps after which `control` starts. Default: 0.",
    )
    control_guidance_end: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Fraction of the steps at which `control` ends. Default: 1.",
    )

    @model_validator(mode="after")
    def _is_for_a_control(self) -> ControlFields:
        if self.control is None:
            for name in _CONTROL_OPTIONS:
                if getattr(self, name) is not None:
                    raise WrongField(name, "requires control; set control as well")
        return self

    @model_validator(mode="after")
    def _ends_after_its_start(self) -> ControlFields:
        if self.part[0] >= self.part[1]:
            raise WrongField("control_guidance_start", "must be less than control_guidance_end")
        return self

    @property
    def part(self) -> tuple[float, float]:
        """Fractions of the steps, from 0 to 1, at which the control starts and stops guiding."""
        start, end = self.control_guidance_start, self.control_guidance_end
        return 0.0 if start is None else start, 1.0 if end is None else end


class IpAdapterFields(Body):
    """IP-Adapter fields, which all image bodies have."""

    ip_adapter: str | None = Field(
        None,
        max_length=64,
        description="Name of the model's IP-Adapter, which draws similarly to an image.",
    )
    ip_adapter_image: str | None = Field(
        None,
        description=(
            "The image for `ip_adapter`, in any size: a base64 data: URI, an https URL, or the "
            "ID or URL of a file or result of this API."
        ),
    )
    ip_adapter_scale: float | None = Field(
        None,
        ge=0,
        le=MAX_IP_ADAPTER_SCALE,
        description="Weight of the image. Default: from the catalog, usually 1.",
    )

    @model_validator(mode="after")
    def _is_for_an_ip_adapter(self) -> IpAdapterFields:
        if self.ip_adapter is None:
            for name in _IP_ADAPTER_OPTIONS:
                if getattr(self, name) is not None:
                    raise WrongField(name, "requires ip_adapter; set ip_adapter as well")
        return self


def _have_no_reference(schema: dict[str, Any]) -> None:
    schema["anyOf"][0]["items"] = ControlFields.model_json_schema()


class ImageFields(ControlFields, IpAdapterFields):
    """An image request's parameters. None means the model's default."""

    more_controls: list[ControlFields] | None = Field(
        None,
        max_length=MAX_MORE_CONTROLS,
        description="Other ControlNets that guide the drawing too, each with its own image.",
        json_schema_extra=_have_no_reference,
    )

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARS)
    negative_prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="Image i of a request uses seed + i."
    )
    scheduler: SchedulerName | None = Field(None, description=f"One {SCHEDULER_CHOICE[4:]}")
    clip_skip: ClipSkip | None = Field(
        None, description="Number of final CLIP layers to skip when reading the prompt."
    )
    guidance_rescale: GuidanceRescale | None = Field(
        None, description="How much of the contrast added by guidance to remove, typically 0.7."
    )
    lora_weights: str | None = Field(
        None,
        max_length=MAX_URL_CHARS,
        description=(
            "Name of one of the model's adapters, or, if the model accepts URLs, the https URL "
            "of an adapter file. Append #sha256=DIGEST to accept only a file with that digest."
        ),
    )
    lora_scale: float | None = Field(
        None,
        ge=MIN_LORA_SCALE,
        le=MAX_LORA_SCALE,
        description="Strength of the adapter. Default: from the catalog, usually 1.",
    )
    upscale: Upscale | None = Field(
        None,
        description=(
            "Factor by which to enlarge width and height, 2 or 4, if the model has an upscaler."
        ),
    )

    @model_validator(mode="after")
    def _has_a_first_control(self) -> ImageFields:
        if self.more_controls and self.control is None:
            raise WrongField(MORE_CONTROLS, "requires control; set control first")
        return self


def guide_urls(body: ImageFields) -> dict[str, str]:
    """Returns the URLs of the guides' images, keyed by slot."""
    named = {name: getattr(body, name) for name in GUIDE_IMAGES}
    for index, control in enumerate(body.more_controls or ()):
        named[place_of_control(index)] = control.control_image
    return {name: url for name, url in named.items() if url is not None}


def place_of_control(index: int) -> str:
    """Returns the slot for a control's image in `more_controls`."""
    return f"{MORE_CONTROLS}[{index}].{CONTROL_IMAGE}"


def check_guides(body: ImageFields, model: Model, *, files: Collection[str] = ()) -> None:
    """Checks that a model supports a request's guides.

    Args:
        files: fields whose images were uploaded as form files.

    Raises:
        BadInput: the model has no such guide, or the guide's image is missing.
    """
    _check_control(body, model, has_picture=CONTROL_IMAGE in files)
    for index, control in enumerate(body.more_controls or ()):
        place = f"{MORE_CONTROLS}[{index}]"
        if control.control is None:
            raise BadInput(
                f"{place}.control: must name one of the model's controls", field=MORE_CONTROLS
            )
        try:
            _check_control(control, model, has_picture=False)
        except BadInput as error:
            raise BadInput(f"{place}.{error.message}", field=MORE_CONTROLS) from error
    _check_ip_adapter(body, model, has_picture=IP_ADAPTER_IMAGE in files)


def check_accepted(body: ImageFields, model: Model, mode: ImageMode) -> None:
    """Checks that a model's pipeline accepts a request's fields.

    Args:
        model: the model to check. If its interface is not known here, the model's workers check the
            fields.
        mode: the kind of input on which the generated image is based.

    Raises:
        BadInput: the model does not accept a field or the mode.
    """
    interface = model.image.interface
    if interface is None:
        return
    present = {name for name in body.model_fields_set if getattr(body, name) not in (None, "")}
    for name in sorted(present):
        if not interface.accepts(name):
            reason = f"{name}: is not supported by {model.name}; omit it"
            raise BadInput(reason, field=name)
    if body.scheduler is not None and body.scheduler not in interface.schedulers:
        known = ", ".join(interface.schedulers)
        reason = f"scheduler: {model.name} accepts only {known}"
        raise BadInput(reason, field="scheduler")
    if reason := refuse_mode(mode, interface.tasks):
        field = "mask" if mode == "mask" else "image"
        raise BadInput(f"{field}: {reason}", field=field)


def _check_control(body: ControlFields, model: Model, *, has_picture: bool) -> None:
    """Checks that a model supports a request's control.

    Args:
        has_picture: True if its image was uploaded as a form file.

    Raises:
        BadInput: the model has no such control, or its image is missing.
    """
    controls = model.image.controls
    if body.control is None:
        if has_picture:
            raise BadInput(
                f"{CONTROL_IMAGE}: requires control; set control as well", field=CONTROL_IMAGE
            )
        return
    if body.control not in controls:
        accepted = f"; it has {', '.join(controls)}" if controls else "; omit it"
        reason = f"{model.name} has no control {body.control!r}{accepted}"
        raise BadInput(f"control: {reason}", field="control")
    if body.control_image is None and not has_picture:
        raise BadInput(
            f"{CONTROL_IMAGE}: is required for control {body.control}", field=CONTROL_IMAGE
        )


def _check_ip_adapter(body: IpAdapterFields, model: Model, *, has_picture: bool) -> None:
    """Checks that a model supports a request's IP-Adapter.

    Args:
        has_picture: True if its image was uploaded as a form file.

    Raises:
        BadInput: the model has no such IP-Adapter, or its image is missing.
    """
    known = model.image.ip_adapters
    if body.ip_adapter is None:
        if has_picture:
            reason = "requires ip_adapter; set ip_adapter as well"
            raise BadInput(f"{IP_ADAPTER_IMAGE}: {reason}", field=IP_ADAPTER_IMAGE)
        return
    if body.ip_adapter not in known:
        accepted = f"; it has {', '.join(known)}" if known else "; omit it"
        reason = f"{model.name} has no IP-Adapter {body.ip_adapter!r}{accepted}"
        raise BadInput(f"{IP_ADAPTER}: {reason}", field=IP_ADAPTER)
    if body.ip_adapter_image is None and not has_picture:
        reason = f"is required for ip_adapter {body.ip_adapter}"
        raise BadInput(f"{IP_ADAPTER_IMAGE}: {reason}", field=IP_ADAPTER_IMAGE)


def show_files(raw_input: Mapping[str, Any], urls: Mapping[str, str]) -> dict[str, Any]:
    """Returns an input with files replaced by their URLs.

    Args:
        urls: URLs of the files that were sent inline in the input, keyed by slot.
    """
    result = dict(raw_input)
    if MORE_CONTROLS in result:
        result[MORE_CONTROLS] = [
            dict(control) | ({CONTROL_IMAGE: urls[place]} if place in urls else {})
            for index, control in enumerate(result[MORE_CONTROLS] or ())
            if (place := place_of_control(index))
        ]
    return result | {name: url for name, url in urls.items() if name in result}


def show_guides(schema: dict[str, Any], models: Iterable[Model]) -> dict[str, Any]:
    """Returns a body's JSON Schema, limited to the fields these image models accept."""
    known = list(models)
    controls = sorted({name for model in known for name in model.image.controls})
    ip_adapters = sorted({name for model in known for name in model.image.ip_adapters})
    properties = dict(schema["properties"])
    for fields, names in ((CONTROL_FIELDS, controls), (IP_ADAPTER_FIELDS, ip_adapters)):
        if names:
            properties[fields[0]] = _restrict_to_names(properties[fields[0]], names)
            if MORE_CONTROLS in fields and MORE_CONTROLS in properties:
                more = copy.deepcopy(properties[MORE_CONTROLS])
                own = more["anyOf"][0]["items"]["properties"]
                own["control"] = _restrict_to_names(own["control"], names)
                properties[MORE_CONTROLS] = more
        else:
            properties = {name: field for name, field in properties.items() if name not in fields}
    for name in [*properties]:
        if known and not any(model.image.accepts(name) for model in known):
            del properties[name]
    if known and all(model.image.interface for model in known):
        schedulers = sorted({name for model in known for name in model.image.schedulers})
        properties["scheduler"] = _restrict_to_names(properties["scheduler"], schedulers)
    return schema | {"properties": properties}


def _restrict_to_names(field: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns the schema for a field that accepts these names."""
    # Forms can't express null.
    kinds = [kind | {"enum": names} for kind in field.get("anyOf", ())[:1]]
    return field | ({"anyOf": [*kinds, *field["anyOf"][1:]]} if kinds else {"enum": names})
