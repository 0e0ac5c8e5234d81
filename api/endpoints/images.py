"""Generated images in OpenAI's shape: from a body to inputs, and from results to a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from api.endpoints.base import Endpoint, LineRequest, ReplyTools
from api.inputs.image_params import first_image, size_of
from api.schemas.openai import EditForm, GenerationBody
from api.schemas.openai_replies import ImageItem, ImagesReply
from shared.blob import Blob
from shared.catalog import Catalog, Model
from shared.errors import BadInput, PenstockError, Unavailable
from shared.messages import ItemOutcome
from shared.stores.objects import ObjectStore
from shared.tasks.image import ImageInput, ImageResult

RESULT_LIMIT_BYTES = 64 * 1024 * 1024
_BYTES_PER_PIXEL = 4
"""An image in base64, at most: three bytes a pixel, which noise does not compress, and a third."""


class GenerationsEndpoint(Endpoint):
    """Lines whose body is that of POST /v1/images/generations."""

    path = "/v1/images/generations"

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """One item for each image. Links end within an hour, so they are refused."""
        body = GenerationBody.model_validate_json(data, strict=True)
        if body.response_format == "url":
            raise BadInput(
                "response_format: a link would end before the batch is read; use b64_json",
                field="response_format",
            )
        model = model_of(body, catalog)
        first = first_of(body, model)
        start = default_seed if body.seed is None else body.seed
        inputs = consecutive(first, start, body.n)
        reply_bytes = body.n * first.width * first.height * _BYTES_PER_PIXEL
        return LineRequest(body, model, inputs, body.seed is not None, reply_bytes)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """The images as base64."""
        body = cast(GenerationBody, request.body)
        results = results_of(outcomes, request.model)
        items = []
        for result in results:
            png = await read_image(tools.objects, result.image)
            data = await tools.image_codec.encode(
                png, body.output_format, body.output_compression, tools.deadline_s, is_new=False
            )
            items.append(ImageItem(result.seed, b64_json=data))
        size = f"{results[0].width}x{results[0].height}"
        return msgspec.json.encode(ImagesReply(items, request.model.name, size, body.output_format))


def model_of(body: GenerationBody | EditForm, catalog: Catalog) -> Model:
    """The model that a body names, or the first image model of the catalog.

    Raises:
        UnknownModel: there is no such image model.
    """
    if body.model is None:
        return catalog.default("image")
    return catalog.find(body.model, "image")


def size_in(body: GenerationBody | EditForm, model: Model) -> tuple[int, int] | None:
    """The requested width and height. None for `auto`.

    Raises:
        BadInput: the model can't produce it.
    """
    return None if body.size == "auto" else size_of(body.size, model)


def first_of(body: GenerationBody, model: Model) -> ImageInput:
    """The first image of a body.

    Raises:
        BadInput: the model can't produce it.
    """
    return first_image(body, model, size_in(body, model) or (model.image.width, model.image.height))


def consecutive(first: ImageInput, start: int, count: int) -> list[ImageInput]:
    """The images of a request: like the first one, with the seeds from `start` on."""
    return [msgspec.structs.replace(first, seed=start + number) for number in range(count)]


def results_of(outcomes: Sequence[ItemOutcome], model: Model) -> list[ImageResult]:
    """The images of outcomes, all of which have a result."""
    results = [outcome.result for outcome in outcomes]
    images = [result for result in results if isinstance(result, ImageResult)]
    if len(images) < len(results):
        raise PenstockError(f"{model.name} gave a result that is no image; this is a bug")
    return images


async def read_image(objects: ObjectStore, image: Blob) -> bytes:
    """The bytes of an image, which may be in the object store.

    Raises:
        Unavailable: the object store is out of reach, or the image was removed meanwhile.
    """
    if image.data is not None:
        return image.data
    if image.object_key is None:
        raise PenstockError("an image has neither bytes nor a key; this is a bug")
    try:
        return await objects.get(image.object_key, RESULT_LIMIT_BYTES)
    except BadInput as error:
        raise Unavailable("the image is no longer there; send the request again") from error
