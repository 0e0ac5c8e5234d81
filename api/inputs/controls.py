"""ControlNets in requests for images: the fields of a body, and what they become.

The words are those of diffusers' pipelines. `control` names one of the catalog.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from api.bodies import Body
from api.errors import WrongField
from api.inputs.source_images import ImageCaller, SourceImages
from shared.catalog import Model
from shared.errors import BadInput
from shared.image_entry import MAX_CONTROL_SCALE
from shared.tasks.image import ControlInput

CONTROL_IMAGE = "control_image"
_OPTIONS = (
    CONTROL_IMAGE,
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)
CONTROL_FIELDS = ("control", *_OPTIONS)


class ControlFields(Body):
    """The fields of all bodies for images that are for ControlNets."""

    control: str | None = Field(
        None,
        max_length=64,
        description="The ControlNet of the model that guides the drawing, by its name.",
    )
    control_image: str | None = Field(
        None,
        description=(
            "The image for `control`, in any size: a base64 data: URI, an https URL, "
            "or the id or URL of a file or result of this API."
        ),
    )
    controlnet_conditioning_scale: float | None = Field(
        None,
        ge=0,
        le=MAX_CONTROL_SCALE,
        description="How much `control` guides. Default: that of the catalog, mostly 1.",
    )
    control_guidance_start: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="The part of the steps after which `control` guides. Default: 0.",
    )
    control_guidance_end: float | None = Field(
        None,
        gt=0,
        le=1,
        description="The part of the steps until which `control` guides. Default: 1.",
    )

    @model_validator(mode="after")
    def _is_for_a_control(self) -> ControlFields:
        if self.control is None:
            for name in _OPTIONS:
                if getattr(self, name) is not None:
                    raise WrongField(name, "is for control; name one")
        if self.part[0] >= self.part[1]:
            raise WrongField("control_guidance_start", "is not below control_guidance_end")
        return self

    @property
    def part(self) -> tuple[float, float]:
        """The part of the steps in which the control guides, from 0 to 1."""
        start, end = self.control_guidance_start, self.control_guidance_end
        return 0.0 if start is None else start, 1.0 if end is None else end


def check_control(body: ControlFields, model: Model, *, has_picture: bool) -> None:
    """Validates the control of a request for a model.

    `has_picture`: its image came as a file of a form.

    Raises:
        BadInput: the model has no such control, or its image is missing.
    """
    controls = model.image.controls
    if body.control is None:
        if has_picture:
            raise BadInput(f"{CONTROL_IMAGE}: is for control; name one", field=CONTROL_IMAGE)
        return
    if body.control not in controls:
        accepted = f"; it has {', '.join(controls)}" if controls else "; leave it out"
        reason = f"{model.name} has no control {body.control!r}{accepted}"
        raise BadInput(f"control: {reason}", field="control")
    if body.control_image is None and not has_picture:
        raise BadInput(
            f"{CONTROL_IMAGE}: give the image for control {body.control}", field=CONTROL_IMAGE
        )


async def prepare_control(
    body: ControlFields,
    data: bytes,
    size: tuple[int, int] | None,
    model: Model,
    caller: ImageCaller,
    images: SourceImages,
) -> tuple[ControlInput, tuple[int, int]]:
    """Returns the control of a request, which was checked, and the size of its image.

    Args:
        body: the fields.
        data: the file of the image.
        size: that of the image to draw. None: as the image, with the usual pixels of the model.
        model: the model.
        caller: who asks.
        images: prepares images.

    Raises:
        BadInput: the file is not an image, or it is broken. Names `control_image`.
    """
    assert body.control is not None, "it was checked; this is a bug"
    entry = model.image.controls[body.control]
    image = await images.prepare(data, size, model.image, caller, field=CONTROL_IMAGE)
    asked_scale = body.controlnet_conditioning_scale
    scale = entry.scale if asked_scale is None else asked_scale
    start, end = body.part
    control = ControlInput(body.control, entry.version, image.image, scale, start, end)
    return control, image.size
