"""IP-Adapters in requests for images: the fields of a body, and what they become.

The words are those of diffusers' pipelines, and of Replicate's models. `ip_adapter` names one of
the catalog.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from api.bodies import Body
from api.errors import WrongField
from api.inputs.source_images import ImageCaller, SourceImages
from shared.catalog import Model
from shared.errors import BadInput
from shared.image_entry import MAX_IP_ADAPTER_SCALE
from shared.tasks.image import IpAdapterInput

IP_ADAPTER = "ip_adapter"
IP_ADAPTER_IMAGE = "ip_adapter_image"
_OPTIONS = (IP_ADAPTER_IMAGE, "ip_adapter_scale")
IP_ADAPTER_FIELDS = (IP_ADAPTER, *_OPTIONS)


class IpAdapterFields(Body):
    """The fields of all bodies for images that are for IP-Adapters."""

    ip_adapter: str | None = Field(
        None,
        max_length=64,
        description="The IP-Adapter of the model that draws after an image, by its name.",
    )
    ip_adapter_image: str | None = Field(
        None,
        description=(
            "The image for `ip_adapter`, in any size: a base64 data: URI, an https URL, "
            "or the id or URL of a file or result of this API."
        ),
    )
    ip_adapter_scale: float | None = Field(
        None,
        ge=0,
        le=MAX_IP_ADAPTER_SCALE,
        description="How much the image counts. Default: that of the catalog, mostly 1.",
    )

    @model_validator(mode="after")
    def _is_for_an_ip_adapter(self) -> IpAdapterFields:
        if self.ip_adapter is None:
            for name in _OPTIONS:
                if getattr(self, name) is not None:
                    raise WrongField(name, "is for ip_adapter; name one")
        return self


def check_ip_adapter(body: IpAdapterFields, model: Model, *, has_picture: bool) -> None:
    """Validates the IP-Adapter of a request for a model.

    `has_picture`: its image came as a file of a form.

    Raises:
        BadInput: the model has no such IP-Adapter, or its image is missing.
    """
    known = model.image.ip_adapters
    if body.ip_adapter is None:
        if has_picture:
            reason = "is for ip_adapter; name one"
            raise BadInput(f"{IP_ADAPTER_IMAGE}: {reason}", field=IP_ADAPTER_IMAGE)
        return
    if body.ip_adapter not in known:
        accepted = f"; it has {', '.join(known)}" if known else "; leave it out"
        reason = f"{model.name} has no IP-Adapter {body.ip_adapter!r}{accepted}"
        raise BadInput(f"{IP_ADAPTER}: {reason}", field=IP_ADAPTER)
    if body.ip_adapter_image is None and not has_picture:
        reason = f"give the image for ip_adapter {body.ip_adapter}"
        raise BadInput(f"{IP_ADAPTER_IMAGE}: {reason}", field=IP_ADAPTER_IMAGE)


async def prepare_ip_adapter(
    body: IpAdapterFields, data: bytes, model: Model, caller: ImageCaller, images: SourceImages
) -> IpAdapterInput:
    """Returns the IP-Adapter of a request, which was checked.

    Args:
        body: the fields.
        data: the file of the image.
        model: the model.
        caller: who asks.
        images: prepares images.

    Raises:
        BadInput: the file is not an image, or it is broken. Names `ip_adapter_image`.
    """
    assert body.ip_adapter is not None, "it was checked; this is a bug"
    entry, scale = model.image.ip_adapters[body.ip_adapter], body.ip_adapter_scale
    image = await images.prepare_reference(data, caller, IP_ADAPTER_IMAGE)
    return IpAdapterInput(
        body.ip_adapter, entry.version, image, entry.scale if scale is None else scale
    )
