"""Reads both forms of an edit request: a form with a file, and JSON with a data: URI."""

from __future__ import annotations

from starlette.datastructures import FormData, UploadFile

from api.http.request import ApiRequest
from api.http.upload_form import closed_form
from api.inputs.image_codec import data_of_uri
from api.schemas.openai import EditBody, EditForm
from shared.errors import BadInput

IMAGE_FIELDS = ("image", "image[]")
NO_MASK = "mask: masks are not supported; the whole image is redrawn, as much as `strength` says"
_LARGEST_FIELD_BYTES = 256 * 1024
MOST_EDIT_FIELDS = 64


async def read_edit(call: ApiRequest) -> tuple[EditForm, bytes]:
    """Returns the validated fields of an edit request, and the bytes of its source image.

    Raises:
        ValidationError: a field is wrong.
        BadInput: there is not exactly one image, there is a mask, or the body is neither form nor
            JSON.
    """
    kind = call.http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _read_form(call)
    if kind in ("application/json", ""):
        body = await call.read_json(EditBody)
        return body, await data_of_uri(
            body.images[0].image_url, "images[0].image_url", field="images"
        )
    raise BadInput(
        f"content-type: {kind!r} is neither multipart/form-data nor application/json",
        field="content-type",
    )


async def _read_form(call: ApiRequest) -> tuple[EditForm, bytes]:
    call.check_charset()
    form_limits = {
        "max_files": 4,
        "max_fields": MOST_EDIT_FIELDS,
        "max_part_size": _LARGEST_FIELD_BYTES,
    }
    async with closed_form(call.http, **form_limits) as form:
        data = await _only_image(form)
        fields = {name: value for name, value in form.items() if name not in IMAGE_FIELDS}
        if misplaced := [name for name, value in fields.items() if isinstance(value, UploadFile)]:
            raise BadInput(f"{misplaced[0]}: this field is not a file", field=misplaced[0])
        # Every field of a form is text, so numbers may be strings here.
        return EditForm.model_validate(fields), data


async def _only_image(form: FormData) -> bytes:
    if "mask" in form:
        raise BadInput(NO_MASK, field="mask")
    images = [value for name in IMAGE_FIELDS for value in form.getlist(name)]
    if len(images) != 1:
        raise BadInput(f"image: exactly one file is needed, not {len(images)}", field="image")
    if not isinstance(images[0], UploadFile):
        raise BadInput("image: a file is needed, not text", field="image")
    return await images[0].read()
