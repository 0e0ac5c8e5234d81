"""POST /v1/images/generations (from a prompt) and POST /v1/images/edits (from an image)."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.endpoints.images import (
    consecutive,
    first_of,
    model_of,
    read_image,
    results_of,
    size_in,
)
from api.http.disconnect import while_connected
from api.http.edit_body import read_edit
from api.http.fast_route import FastRoute
from api.http.openapi import inference_body, inference_responses
from api.http.openapi_headers import TRUNCATED_HEADER
from api.http.request import ApiRequest, open_request
from api.inputs.image_params import check_strength, first_image
from api.schemas.openai import EditBody, EditForm, GenerationBody
from api.schemas.openai_replies import ImageItem, ImagesReply
from shared.catalog import Model
from shared.predictions import MEDIA_TYPES
from shared.stores.objects import object_key
from shared.tasks.image import ImageInput, ImageResult

router = APIRouter(route_class=FastRoute)


@router.post(
    "/v1/images/generations",
    summary="Create images from a prompt",
    openapi_extra=inference_body(GenerationBody),
    responses=inference_responses(ImagesReply, "X-Penstock-Seed", "X-Penstock-Truncated-Tokens"),
)
async def create_images(request: Request) -> Response:
    """Answers when all images are ready.

    With a seed the same request gives the same images, mostly from the cache.
    """
    call = open_request(request)
    body = await call.read_json(GenerationBody)
    model = _find_model(call, body)
    return await _answer(call, body, model, first_of(body, model))


@router.post(
    "/v1/images/edits",
    summary="Create images from an image and a prompt",
    description=(
        "Image-to-image: the source is resized to the output size "
        "and changed as much as `strength` says."
    ),
    openapi_extra=inference_body(EditBody, form=EditForm),
    responses=inference_responses(ImagesReply, "X-Penstock-Seed", "X-Penstock-Truncated-Tokens"),
)
async def edit_image(request: Request) -> Response:
    """Image-to-image: the source is resized, and changed as much as `strength` says."""
    call = open_request(request)
    body, data = await read_edit(call)
    model = _find_model(call, body)
    call.check_room(model, body.n)
    image_codec, deadline_s = (
        call.dependencies.image_codec,
        call.options.answer_by_s(model.deadline),
    )
    preparing = image_codec.prepare_source(
        data, size_in(body, model), model.image, deadline_s, tenant=call.tenant
    )
    source, size = await while_connected(request.receive, preparing)
    first = first_image(body, model, size)
    check_strength(first.steps, body.strength)
    return await _answer(
        call, body, model, msgspec.structs.replace(first, image=source, strength=body.strength)
    )


def _find_model(call: ApiRequest, body: GenerationBody | EditForm) -> Model:
    model = model_of(body, call.dependencies.catalog)
    call.use(model)
    return model


async def _answer(
    call: ApiRequest, body: GenerationBody | EditForm, model: Model, first: ImageInput
) -> Response:
    """Computes n images with consecutive seeds, and answers with them."""
    key_seed = call.context.key_seed
    start = first.seed if body.seed is not None or key_seed is None else key_seed
    inputs = consecutive(first, start, body.n)
    # A random seed never comes again, so its image is not worth a place in the cache.
    is_repeatable = body.seed is not None or key_seed is not None
    deadline_s = call.options.answer_by_s(model.deadline)
    async with call.inferred(model, inputs, is_repeatable=is_repeatable) as response:
        images = results_of(response.outcomes, model)
        items = [await _encode(call, body, result, deadline_s) for result in images]
    headers = call.context.headers
    headers["x-penstock-seed"] = ",".join(str(result.seed) for result in images)
    if (truncated := ImageResult.count_truncated(images)) is not None:
        headers[TRUNCATED_HEADER] = str(truncated)
    reply = ImagesReply(items, model.name, f"{first.width}x{first.height}", body.output_format)
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _encode(
    call: ApiRequest, body: GenerationBody | EditForm, result: ImageResult, deadline_s: float
) -> ImageItem:
    """One image in the requested format, as bytes or as a link."""
    objects = call.dependencies.objects
    stored_key = result.image.object_key
    if body.response_format == "url" and body.output_format == "png" and stored_key is not None:
        return ImageItem(result.seed, url=call.link_to(stored_key, result.image.media_type))
    png = await read_image(objects, result.image)
    encoding = call.dependencies.image_codec.encode(
        png,
        body.output_format,
        body.output_compression,
        deadline_s,
        is_new=False,
        tenant=call.tenant,
    )
    data = await while_connected(call.http.receive, encoding)
    if body.response_format == "b64_json":
        return ImageItem(result.seed, b64_json=data)
    media_type = MEDIA_TYPES[body.output_format]
    key = object_key("results", data, media_type)
    await objects.put(key, data, media_type)
    return ImageItem(result.seed, url=call.link_to(key, media_type))
