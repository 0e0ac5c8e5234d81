"""POST /v1/images/generations and POST /v1/images/edits: from a prompt, or from a picture and a prompt."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.http.dependencies import Dependencies, dependencies_of
from api.http.edit_body import read_edit
from api.http.fast_route import FastRoute
from api.http.middleware import context_of, while_connected
from api.http.openapi import body_of, inferred
from api.http.openapi_headers import TRUNCATED_HEADER
from api.http.request import answer_by_s, check_room, infer, link_to, read_json, tenant_of
from api.inputs.image_codec import MEDIA_TYPES
from api.inputs.image_params import check_strength, first_image, size_of
from api.schemas.openai import EditBody, EditForm, GenerationBody, ImageItem, ImagesReply
from shared.blob import Blob
from shared.catalog import Model
from shared.errors import PenstockError
from shared.stores.objects import object_key
from shared.tasks.image import ImageInput, ImageResult

router = APIRouter(route_class=FastRoute)
RESULT_LIMIT_BYTES = 64 * 1024 * 1024


@router.post(
    "/v1/images/generations",
    summary="Create images from a prompt",
    openapi_extra=body_of(GenerationBody),
    responses=inferred(ImagesReply, "X-Penstock-Seed", "X-Penstock-Truncated-Tokens"),
)
async def create_images(request: Request) -> Response:
    """Answers when all images are ready. With a seed the same request gives the same images, mostly from the cache."""
    tenant = tenant_of(request)
    body = await read_json(request, GenerationBody)
    model = _model(request, body)
    first = first_image(body, model, _size(body, model) or (model.image.width, model.image.height))
    return await _draw(request, body, model, tenant, first)


@router.post(
    "/v1/images/edits",
    summary="Create images from an image and a prompt",
    openapi_extra=body_of(EditBody, form=EditForm),
    responses=inferred(ImagesReply, "X-Penstock-Seed", "X-Penstock-Truncated-Tokens"),
)
async def edit_image(request: Request) -> Response:
    """Image-to-image: the source is resized to the output size and changed as much as `strength` says."""
    tenant = tenant_of(request)
    body, data = await read_edit(request)
    model = _model(request, body)
    check_room(request, model, body.n)
    image_codec, deadline_s = dependencies_of(request).image_codec, answer_by_s(request, model)
    preparing = image_codec.prepare_source(data, _size(body, model), model.image, deadline_s)
    source, size = await while_connected(request, preparing)
    first = first_image(body, model, size)
    check_strength(first.steps, body.strength)
    return await _draw(
        request, body, model, tenant, msgspec.structs.replace(first, image=source, strength=body.strength)
    )


def _model(request: Request, body: GenerationBody | EditForm) -> Model:
    catalog = dependencies_of(request).catalog
    model = catalog.find(body.model, "image") if body.model is not None else catalog.default("image")
    context_of(request).model = model.name
    return model


def _size(body: GenerationBody | EditForm, model: Model) -> tuple[int, int] | None:
    """The width and height asked for, checked; None for `auto`."""
    return None if body.size == "auto" else size_of(body.size, model)


async def _draw(
    request: Request, body: GenerationBody | EditForm, model: Model, tenant: str, first: ImageInput
) -> Response:
    """Has n images drawn, from seeds that count up, and answers with them."""
    key_seed = context_of(request).key_seed
    start = first.seed if body.seed is not None or key_seed is None else key_seed
    inputs = [msgspec.structs.replace(first, seed=start + number) for number in range(body.n)]
    # A seed nobody chose never comes again, so keeping its image would only push others out.
    is_repeatable = body.seed is not None or key_seed is not None
    answer = await infer(request, model, tenant, inputs, is_repeatable=is_repeatable)
    results = [outcome.result for outcome in answer.outcomes]
    drawn = [result for result in results if isinstance(result, ImageResult)]
    if len(drawn) < len(results):
        raise PenstockError(f"{model.name} gave a result that is no image; this is a bug")
    headers = context_of(request).headers
    headers["x-penstock-seed"] = ",".join(str(result.seed) for result in drawn)
    if (left_out := ImageResult.count_truncated(drawn)) is not None:
        headers[TRUNCATED_HEADER] = str(left_out)
    deadline_s = answer_by_s(request, model)
    items = [await _item(request, body, result, deadline_s) for result in drawn]
    reply = ImagesReply(items, model.name, f"{first.width}x{first.height}", body.output_format)
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _item(request: Request, body: GenerationBody | EditForm, result: ImageResult, deadline_s: float) -> ImageItem:
    """One image as the caller wants it: bytes or link, in the format asked for."""
    dependencies = dependencies_of(request)
    stored_key = result.image.object_key
    if body.response_format == "url" and body.output_format == "png" and stored_key is not None:
        return ImageItem(result.seed, url=link_to(request, stored_key, result.image.media_type))
    encoding = dependencies.image_codec.encode(
        await _bytes(dependencies, result.image), body.output_format, body.output_compression, deadline_s, is_new=False
    )
    data = await while_connected(request, encoding)
    if body.response_format == "b64_json":
        return ImageItem(result.seed, b64_json=data)
    media_type = MEDIA_TYPES[body.output_format]
    key = object_key("results", data, media_type)
    await dependencies.objects.put(key, data, media_type)
    return ImageItem(result.seed, url=link_to(request, key, media_type))


async def _bytes(dependencies: Dependencies, image: Blob) -> bytes:
    if image.data is not None:
        return image.data
    if image.object_key is None:
        raise PenstockError("an image has neither bytes nor a key; this is a bug")
    return await dependencies.objects.get(image.object_key, RESULT_LIMIT_BYTES)
