"""POST /v1/images/edits and /v1/images/variations: redraws an image, optionally within a mask.

An edit has a prompt and is sent as either form data with files or JSON. If there is a mask, only
its transparent area is redrawn. A variation is image-to-image without a prompt. images.py builds
the responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import ConfigDict, Field, field_validator, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from api.bodies import Body, Option
from api.errors import WrongField
from api.http.call import ModelCall
from api.http.connection import while_connected
from api.http.router import Router
from api.http.upload_form import open_form
from api.inputs.guides import (
    GUIDE_IMAGES,
    MORE_CONTROLS,
    check_accepted,
    check_guides,
    guide_urls,
)
from api.inputs.image_codec import data_of_uri
from api.inputs.image_draft import MAX_MASK_BLUR, USUAL_STRENGTH, ImageDraft, ImageSource
from api.inputs.source_images import ACCEPTED
from api.openai.images import (
    FORM_LIMITS,
    OWN_HEADERS,
    ImageBody,
    ImageRequests,
    ImageRoute,
    ImagesReply,
)
from shared.errors import BadInput
from shared.models.catalog import Model
from shared.models.tasks.image import ImageInput

_WHITE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAATUlEQVR42u3PQQ0AAAgEILV/5zOFDz"
    "doQCepz6aeExAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQELi3cqoDfaKuZM4AAAAASUVORK5CYI"
    "I="
)
"""A 64 x 64 pixel white PNG, so that the example works unchanged."""
MASK = "The transparent area is redrawn. Must have the width and height of the image."

VARIED_STRENGTH = 0.6
"""A variation's strength: preserves large features and redraws small ones."""
UNGUIDED = 1.0
"""Guidance scale for a variation, which has no prompt to guide it."""

IMAGE_FIELDS = ("image", "image[]")
IMAGE_URL = "images[0].image_url"
MASK_URL = "mask.image_url"
FILE_FIELDS = {IMAGE_URL: "images", MASK_URL: "mask"}
"""Field names used in errors, keyed by file slot."""
NO_MASK = "requires a mask; omit it otherwise"
NO_MARKUP = (
    "markup is not supported; send a mask that is transparent where the image should be redrawn"
)


class SourceImage(Body):
    """A source image or a mask in a JSON body."""

    image_url: str = Field(
        description=(
            "A base64 data: URI, an https URL, or the URL of a file or result of this API."
        ),
        json_schema_extra={"pattern": "^(data:|https?://)"},
    )

    @field_validator("image_url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not value.startswith(("data:", "https://", "http://")):
            raise ValueError(ACCEPTED)
        return value


def _as_form(schema: dict[str, Any]) -> None:
    known = schema["properties"]
    schema["properties"] = {
        name: field
        for name, field in known.items()
        if field.get("type") != "null" and name != MORE_CONTROLS
    }
    for field in schema["properties"].values():
        # Form data can't express null. Absent fields are not sent.
        kinds = [kind for kind in field.pop("anyOf", ()) if kind["type"] != "null"]
        field |= kinds[0] if kinds else {}
        if "enum" in field:
            field["enum"] = [value for value in field["enum"] if value is not None]
        if field.get("default", "") is None:
            del field["default"]
    schema["properties"]["image"] = {
        "type": "string",
        "format": "binary",
        "description": (
            "PNG, JPEG, WebP, AVIF, GIF, TIFF or BMP. If the file has several images, the "
            "first is used."
        ),
    }
    schema["required"] = [*schema.get("required", ()), "image"]


def _as_edit_form(schema: dict[str, Any]) -> None:
    _as_form(schema)
    schema["properties"]["mask"] = {"type": "string", "format": "binary", "description": MASK}


class EditForm(ImageBody):
    """A prompt and a source image, as form data. The files are in the fields `image` and `mask`."""

    model_config = ConfigDict(json_schema_extra=_as_edit_form)

    usual_strength: ClassVar = USUAL_STRENGTH
    strength: float | None = Field(
        None,
        gt=0,
        le=1,
        description=f"Extension: 1 ignores the source image. Default: {USUAL_STRENGTH}.",
    )
    mask_blur: float | None = Field(
        None,
        ge=0,
        le=MAX_MASK_BLUR,
        description=(
            "Extension: softness of the mask's edge, inward: a standard deviation in pixels."
        ),
    )
    input_fidelity: Option | None = Field(None, description="Accepted, without effect.")


class EditBody(EditForm):
    """A prompt and a source image, as JSON."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "a large blue circle on a white background",
                "images": [{"image_url": _WHITE}],
                "strength": 0.6,
            }
        },
    )

    images: list[SourceImage] = Field(
        min_length=1, max_length=1, description="Exactly one source image."
    )
    mask: SourceImage | None = Field(None, description=MASK)

    @model_validator(mode="after")
    def _blurs_a_mask(self) -> EditBody:
        if self.mask_blur is not None and self.mask is None:
            raise WrongField("mask_blur", NO_MASK)
        return self


def _as_variation_form(schema: dict[str, Any]) -> None:
    _as_form(schema)
    del schema["properties"]["prompt"]


class VariationForm(ImageBody):
    """A source image as multipart form data. The file is in the `image` field."""

    model_config = ConfigDict(json_schema_extra=_as_variation_form)

    prompt: str = ""
    usual_strength: ClassVar = VARIED_STRENGTH
    strength: float | None = Field(
        None,
        gt=0,
        le=1,
        description=f"Extension: how much of the image may change. Default: {VARIED_STRENGTH}.",
    )

    @field_validator("prompt")
    @classmethod
    def _has_none(cls, value: str) -> str:
        if value:
            raise ValueError(
                "must be empty for a variation; to use a prompt, call /v1/images/edits"
            )
        return value


Form = TypeVar("Form", EditForm, VariationForm)


Files = Mapping[str, bytes | str]
"""A request's files by slot (IMAGE_URL, MASK_URL, GUIDE_IMAGES): either data or a URL to fetch."""


async def read_edit(call: ModelCall) -> tuple[EditForm, Files]:
    """Returns an edit request's validated fields and its files.

    Raises:
        ValidationError: a field is invalid.
        BadInput: there is not exactly one image, or the body is neither form data nor JSON.
    """
    kind = call.http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _read_form(call, EditForm)
    if kind in ("application/json", ""):
        body = await call.read_json(EditBody)
        files = {IMAGE_URL: await _bytes_or_url(body.images[0].image_url, IMAGE_URL)}
        if body.mask is not None:
            files[MASK_URL] = await _bytes_or_url(body.mask.image_url, MASK_URL)
        return body, files | guide_urls(body)
    raise BadInput(
        f"content-type: must be multipart/form-data or application/json, got {kind!r}",
        field="content-type",
    )


async def _bytes_or_url(url: str, place: str) -> bytes | str:
    return (
        await data_of_uri(url, place, field=FILE_FIELDS[place]) if url.startswith("data:") else url
    )


async def _read_form(call: ModelCall, kind: type[Form]) -> tuple[Form, Files]:
    call.check_charset()
    async with open_form(call.http, **FORM_LIMITS) as form:
        sources = {IMAGE_URL: await _only_image(form)}
        mask = await _file(form, "mask") if kind is EditForm else None
        if mask is not None:
            sources[MASK_URL] = mask
        known = {*IMAGE_FIELDS, *(("mask",) if kind is EditForm else ())}
        guides = [name for name in GUIDE_IMAGES if isinstance(form.get(name), UploadFile)]
        files = {name: data for name in guides if (data := await _file(form, name)) is not None}
        known.update(guides)
        # Form data can't express null, so clients and pages send an empty field instead.
        fields = {name: value for name, value in form.items() if name not in known and value != ""}
        _check_files(fields, kind)
        if mask is None and "mask_blur" in fields:
            raise BadInput(f"mask_blur: {NO_MASK}", field="mask_blur")
        # Every form field is text, so numbers may be strings here.
        body = kind.model_validate(fields)
        return body, {**sources, **guide_urls(body), **files}


def _check_files(fields: dict[str, UploadFile | str], kind: type[EditForm | VariationForm]) -> None:
    for name, value in fields.items():
        if isinstance(value, UploadFile):
            is_known = name in kind.model_fields
            reason = "must not be a file" if is_known else "unknown parameter"
            raise BadInput(f"{name}: {reason}", field=name)


async def _only_image(form: FormData) -> bytes:
    if form.get("markup", "") != "":
        raise BadInput(f"markup: {NO_MARKUP}", field="markup")
    images = [value for name in IMAGE_FIELDS for value in form.getlist(name)]
    if len(images) != 1:
        raise BadInput(f"image: exactly one file is required, got {len(images)}", field="image")
    if not isinstance(images[0], UploadFile):
        raise BadInput("image: must be a file, not text", field="image")
    return await images[0].read()


async def _file(form: FormData, name: str) -> bytes | None:
    files = [value for value in form.getlist(name) if value != ""]
    if not files:
        return None
    if len(files) > 1:
        raise BadInput(f"{name}: at most one file is allowed, got {len(files)}", field=name)
    if not isinstance(files[0], UploadFile):
        raise BadInput(f"{name}: must be a file, not text", field=name)
    return await files[0].read()


def _check(body: EditForm | VariationForm, model: Model, files: Files) -> None:
    """Checks that a model supports a request.

    Raises:
        BadInput: the model does not support the request.
    """
    check_guides(body, model, files=files)
    check_accepted(body, model, "mask" if MASK_URL in files else "image")


async def _first_image(
    draft: ImageDraft, body: EditForm | VariationForm, files: Files
) -> ImageInput:
    """Returns a request's first image, with its files.

    Raises:
        BadInput: a file can't be loaded, or the model can't use it as a source.
    """
    try:
        await draft.fetch(files)
    except BadInput as error:
        field = FILE_FIELDS.get(error.field or "", error.field)
        raise type(error)(error.message, field=field) from error
    source = ImageSource(
        IMAGE_URL,
        body.usual_strength if body.strength is None else body.strength,
        mask=MASK_URL if MASK_URL in files else None,
        redraws="transparent",
        blur=(body.mask_blur or 0.0) if isinstance(body, EditForm) else 0.0,
    )
    return await draft.first(source)


router = Router(scope="images", route_class=ImageRoute)


@router.post(
    "/v1/images/edits",
    summary="Create images from an image and a prompt",
    description=(
        "Image-to-image: the source is resized to the output size and changed by `strength`. "
        "With a `mask`, only its transparent area is redrawn, and all other pixels stay the same."
    ),
    body=EditBody,
    form=EditForm,
    reply=ImagesReply,
    headers=OWN_HEADERS,
    is_streamed=True,
)
async def edit_image(call: ModelCall, images: ImageRequests) -> Response:
    """Image-to-image: the source is resized, and `strength` sets how much it changes."""
    body, files = await read_edit(call)
    model = images.use_model(call, body)
    images.inference.check_room(call, model, body.n)
    _check(body, model, files)
    draft = images.draft(call, body, model)
    first = await while_connected(call.http, _first_image(draft, body, files))
    return await images.answer(call, body, model, first)


@router.post(
    "/v1/images/variations",
    summary="Create variations of an image",
    description=(
        "Image-to-image with an empty prompt and `strength`: large features of the source stay, "
        "and small ones are redrawn. A form, as sent by OpenAI's clients."
    ),
    form=VariationForm,
    reply=ImagesReply,
    headers=OWN_HEADERS,
    is_streamed=True,
)
async def vary_image(call: ModelCall, images: ImageRequests) -> Response:
    """Runs image-to-image with an empty prompt."""
    body, files = await _read_form(call, VariationForm)
    model = images.use_model(call, body)
    images.inference.check_room(call, model, body.n)
    _check(body, model, files)
    draft = images.draft(call, body, model)
    first = await while_connected(call.http, _first_image(draft, body, files))
    is_asked = body.guidance_scale is not None or body.negative_prompt
    if not is_asked and model.image.accepts("guidance_scale"):
        first = msgspec.structs.replace(first, guidance_scale=UNGUIDED)
    return await images.answer(call, body, model, first)
