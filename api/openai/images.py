"""POST /v1/images/generations: converts request bodies to inputs, and results to responses.

As in OpenAI's API. Requests with a source image (image_edits.py) get the same kind of response.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema
from starlette.requests import Request
from starlette.responses import Response

from api.batches.endpoint import Endpoint, LineCaller, LineRequest, ReplyTools
from api.bodies import EndUser, Option
from api.dispatch.request import InferenceRequest
from api.errors import WrongField
from api.http.call import ModelCall
from api.http.connection import while_connected
from api.http.encode_json import encode_json
from api.http.fast_route import StreamedRoute
from api.http.inference import Inference
from api.http.injection import injectable
from api.http.openapi import TRUNCATED_HEADER
from api.http.recording import Recording
from api.http.router import Router
from api.http.streaming import answer_events
from api.http.upload_form import MAX_EDIT_FIELDS, form_asks_for_stream
from api.inputs.guides import (
    CONTROL_IMAGE,
    GUIDE_IMAGES,
    MORE_CONTROLS,
    ImageFields,
    check_accepted,
    check_guides,
    guide_urls,
)
from api.inputs.image_codec import ImageCodec
from api.inputs.image_draft import ImageDraft, consecutive, first_image, names_files, size_of
from api.inputs.source_images import SourceImages
from api.inputs.storage import Storage
from api.openai.image_stream import ImagePosition, ImageStream
from api.predictions.creation import digest_of
from api.predictions.event_stream import EventStreams
from api.predictions.generation_stream import GenerationStreams, behind
from api.predictions.progress import PredictionProgress
from api.predictions.service import Predictions
from api.tasks.base import Inputs
from api.tasks.image import image_server, images_of, plan_images
from api.validators import null_is
from shared.errors import BadInput, PenstockError, Unavailable
from shared.messages import ItemOutcome
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from shared.models.tasks import Input
from shared.models.tasks.image import ImageInput, ImageResult, ImagesInput
from shared.predictions import MEDIA_TYPES
from shared.stores.objects import ObjectStore, UrlSigner, object_key
from shared.stores.previews import Preview

RESULT_LIMIT_BYTES = 64 * 1024 * 1024
_BYTES_PER_PIXEL = 4
"""Maximum bytes per pixel in a base64 image: 3 bytes (noise does not compress), plus a third."""

FORM_LIMITS = {"max_files": 4, "max_fields": MAX_EDIT_FIELDS, "max_part_size": 256 * 1024}

OWN_HEADERS = ("X-Penstock-Seed", "X-Penstock-Truncated-Tokens", "X-Penstock-Withheld")

WITHHELD_HEADER = "x-penstock-withheld"
"""Response header with the number of images withheld by the safety check."""


class ImageItem(msgspec.Struct, omit_defaults=True):
    """One image: base64, or a link valid for 60 minutes.

    The same `seed` always produces the same image.
    """

    seed: int
    b64_json: bytes | None = None
    url: str | None = None


class ImagesReply(msgspec.Struct):
    """Images in seed order."""

    data: list[ImageItem]
    model: str
    size: str
    output_format: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class ImageBody(ImageFields):
    """Fields shared by all image requests. All ImageFields except the prompt are extensions."""

    model: str | None = Field(None, description="Default: the first image model in the catalog.")
    n: Annotated[int, null_is(1)] = Field(1, ge=1, le=10)
    size: Annotated[str, null_is("auto")] = Field(
        "auto", pattern=r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$", description="WIDTHxHEIGHT, or auto."
    )
    response_format: Annotated[Literal["url", "b64_json"], null_is("b64_json")] = "b64_json"
    output_format: Annotated[Literal["png", "jpeg", "webp"], null_is("png")] = "png"
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of jpeg and webp, from 0 to 100."
    )
    quality: Option | None = Field(None, description="Accepted, without effect.")
    style: Option | None = Field(None, description="Accepted, without effect.")
    background: Option | None = Field(None, description="Accepted, without effect.")
    moderation: Option | None = Field(None, description="Accepted, without effect.")
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    complexity: None = None
    frame_count: None = None
    frame_duration_ms: None = None
    svg: None = None
    stream: Annotated[bool, null_is(False)] = Field(
        False, description="True to receive server-sent events, including previews of images."
    )
    partial_images: int | None = Field(
        None,
        ge=0,
        le=3,
        description="With `stream`: maximum number of previews per image.",
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Returns the schema, with extensions to OpenAI's API marked."""
        json_schema = handler(schema)
        fields = handler.resolve_ref_schema(json_schema)["properties"]
        for name in ImageFields.model_fields.keys() & fields.keys() - {"prompt"}:
            description = fields[name].get("description", "")
            fields[name]["description"] = (
                f"Extension: {description[0].lower()}{description[1:]}"
                if description
                else "Extension."
            )
        return json_schema

    @model_validator(mode="after")
    def _is_streamed_as_base64(self) -> ImageBody:
        if self.stream and self.response_format == "url":
            raise WrongField("response_format", "must be b64_json or omitted with stream: true")
        return self

    @model_validator(mode="after")
    def _previews_a_stream(self) -> ImageBody:
        if self.partial_images and not self.stream:
            raise WrongField("partial_images", "requires stream: true; omit it otherwise")
        return self

    @model_validator(mode="after")
    def _png_has_no_quality(self) -> ImageBody:
        if self.output_compression is not None and self.output_format == "png":
            raise WrongField(
                "output_compression", "requires output_format jpeg or webp; omit it otherwise"
            )
        return self


class GenerationBody(ImageBody):
    """A prompt to draw images from."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "a large red circle on a white background",
                "size": "64x64",
                "seed": 7,
            }
        },
    )


class GenerationsEndpoint(Endpoint):
    """Batch lines with the same body as POST /v1/images/generations."""

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item per image.

        Requests for links are rejected, because links expire within an hour.
        """
        body = GenerationBody.model_validate_json(data, strict=True)
        if body.response_format == "url":
            raise BadInput(
                "response_format: must be b64_json in a batch because links would expire before "
                "the results are read",
                field="response_format",
            )
        if body.stream:
            raise BadInput("stream: is not supported in batches; omit it", field="stream")
        model = model_of(body, catalog)
        check_guides(body, model)
        check_accepted(body, model, "text")
        first = first_image(body, model, size_in(body, model))
        start = default_seed if body.seed is None else body.seed
        inputs, is_repeatable = consecutive(first, start, body.n), body.seed is not None
        width, height = size_after(body, first)
        reply_bytes = body.n * width * height * _BYTES_PER_PIXEL
        read = Inputs(inputs, {}, True, is_repeatable, upscale=body.upscale)
        model, read = plan_images(read, model, catalog)
        return LineRequest(body, model, read.inputs, is_repeatable, reply_bytes)

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[Input]:
        """Returns the images, or the flow run that draws them, with the line's files."""
        body, model = cast(GenerationBody, request.body), request.model.requested
        value = request.inputs[0]
        first = value.first if isinstance(value, ImagesInput) else value
        assert isinstance(first, ImageInput), "`read` has created images; this is a bug"
        if not names_files(body, first):
            return request.inputs
        owner, size = caller.file_owner("images"), size_in(body, model)
        draft = ImageDraft(body, model, size, owner, caller.source_images)
        await draft.fetch(guide_urls(body))
        seeded_inputs = consecutive(await draft.first(), first.seed, body.n)
        if isinstance(value, ImagesInput):
            return [msgspec.structs.replace(value, first=seeded_inputs[0])]
        return seeded_inputs

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the images as base64."""
        body = cast(GenerationBody, request.body)
        results = [image for image in images_of(outcomes, request.model) if image is not None]
        items = []
        for result in results:
            png = await read_blob(tools.objects, result.image, "image")
            data = await tools.image_codec.encode(
                png, body.output_format, body.output_compression, tools.deadline_s, is_new=False
            )
            items.append(ImageItem(result.seed, b64_json=data))
        size = f"{results[0].width}x{results[0].height}"
        return msgspec.json.encode(ImagesReply(items, request.model.name, size, body.output_format))


def model_of(body: ImageBody, catalog: Catalog) -> Model:
    """Returns the model named in a body, or the first image model in the catalog.

    Raises:
        UnknownModel: the image model does not exist.
    """
    if body.model is None:
        return catalog.default("image")
    return catalog.find(body.model, "image")


def size_in(body: ImageBody, model: Model) -> tuple[int, int] | None:
    """Returns the requested width and height, or None for `auto`.

    Raises:
        BadInput: the model does not support this size.
    """
    return None if body.size == "auto" else size_of(body.size, model)


def size_after(body: ImageBody, first: ImageInput) -> tuple[int, int]:
    """Returns the delivered images' width and height."""
    scale = body.upscale or 1
    return first.width * scale, first.height * scale


async def read_blob(objects: ObjectStore, blob: Blob, noun: str) -> bytes:
    """Returns a result's data, from the object store if it is stored there.

    `noun`: what error messages call the result.

    Raises:
        Unavailable: the object store is unreachable, or the result has since been deleted.
    """
    if blob.data is not None:
        return blob.data
    if blob.object_key is None:
        raise PenstockError(f"{noun} has neither data nor a key; this is a bug")
    try:
        return await objects.get(blob.object_key, RESULT_LIMIT_BYTES)
    except BadInput as error:
        raise Unavailable(f"the {noun} no longer exists; send the request again") from error


class ImageRoute(StreamedRoute):
    """A route whose body or form may request a stream."""

    async def asks_for_stream(self, request: Request) -> bool:
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            return await super().asks_for_stream(request)
        return await form_asks_for_stream(request, **FORM_LIMITS)


@dataclass(frozen=True, slots=True)
class ImageEncoder:
    """Converts one request's images to the requested format."""

    call: ModelCall
    body: ImageBody
    objects: ObjectStore
    image_codec: ImageCodec
    url_signer: UrlSigner

    async def item(
        self, result: ImageResult, deadline_s: float, *, is_awaited: bool = True
    ) -> ImageItem:
        """Returns one image as data or as a link.

        Args:
            deadline_s: Unix time at which to stop encoding.
            is_awaited: True if the response has not started, in which case a disconnect is
                detected.
        """
        body, stored_key = self.body, result.image.object_key
        if body.response_format == "url" and body.output_format == "png" and stored_key is not None:
            return ImageItem(result.seed, url=self._link_to(stored_key, result.image.media_type))
        png = await read_blob(self.objects, result.image, "image")
        encoding = self.image_codec.encode(
            png,
            body.output_format,
            body.output_compression,
            deadline_s,
            is_new=False,
            tenant=self.call.tenant,
        )
        data = await (while_connected(self.call.http, encoding) if is_awaited else encoding)
        if body.response_format == "b64_json":
            return ImageItem(result.seed, b64_json=data)
        media_type = MEDIA_TYPES[body.output_format]
        key = object_key("results", data, media_type)
        await self.objects.put(key, data, media_type)
        return ImageItem(result.seed, url=self._link_to(key, media_type))

    async def preview(self, preview: Preview, size: tuple[int, int], deadline_s: float) -> bytes:
        """Returns a preview, enlarged to `size`."""
        return await self.image_codec.enlarge(
            preview.image,
            self.body.output_format,
            self.body.output_compression,
            deadline_s,
            size=size,
            tenant=self.call.tenant,
        )

    def _link_to(self, key: str, media_type: str) -> str:
        return self.call.base_url + self.url_signer.path(key, media_type)


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """Draws one request's images, and returns them all at once or as a stream.

    Args:
        first: the first image, with its files.
    """

    call: ModelCall
    body: ImageBody
    model: Model
    first: ImageInput
    catalog: Catalog
    recording: Recording
    source_images: SourceImages
    encoder: ImageEncoder

    async def whole(self) -> Response:
        """Draws n images with consecutive seeds, and returns the response."""
        call, body, model = self.call, self.body, self.model
        key_seed = call.context.key_seed
        start = self.first.seed if body.seed is not None or key_seed is None else key_seed
        inputs = consecutive(self.first, start, body.n)
        # A random seed never occurs again, so its image is not worth caching.
        is_repeatable = body.seed is not None or key_seed is not None
        served = image_server(model, body.upscale, self.catalog)
        run_request = partial(self._record, inputs, is_repeatable=is_repeatable)
        async with self.recording.compute(
            call, served, inputs, run_request, is_repeatable=is_repeatable
        ) as (outcomes, deadline_s):
            images = [image for image in images_of(outcomes, model) if image is not None]
            items = [await self.encoder.item(result, deadline_s) for result in images]
        headers = call.context.headers
        if len(images) < body.n:
            headers[WITHHELD_HEADER] = str(body.n - len(images))
        headers["x-penstock-seed"] = ",".join(str(result.seed) for result in images)
        if (truncated := ImageResult.count_truncated(images)) is not None:
            headers[TRUNCATED_HEADER] = str(truncated)
        width, height = size_after(body, self.first)
        reply = ImagesReply(items, model.name, f"{width}x{height}", body.output_format)
        return encode_json(reply)

    async def stream(
        self,
        event_streams: EventStreams,
        predictions: Predictions,
        progress: PredictionProgress,
        generation_streams: GenerationStreams,
    ) -> Response:
        """Returns the image events after `Last-Event-ID`."""
        call, body, first = self.call, self.body, self.first
        position = ImagePosition.from_id(call.http.headers.get("last-event-id", ""), body.n)
        with ExitStack() as held:
            held.enter_context(event_streams.room.reserve(call.tenant))
            inputs, is_repeatable = consecutive(first, first.seed, body.n), body.seed is not None
            new = await self._record(inputs, is_repeatable=is_repeatable)
            snapshot = await self.recording.start(call, new)
            deadline_s, size = snapshot.prediction.deadline_s, size_after(body, first)

            async def encode(result: ImageResult) -> bytes:
                item = await self.encoder.item(result, deadline_s, is_awaited=False)
                assert item.b64_json is not None, "a stream does not contain links; this is a bug"
                return item.b64_json

            async def enlarge(preview: Preview) -> bytes:
                return await self.encoder.preview(preview, size, deadline_s)

            stream = ImageStream(
                call,
                predictions,
                progress,
                generation_streams,
                kind="image_generation" if first.image is None else "image_edit",
                position=position,
                partial_images=body.partial_images or 0,
                encode=encode,
                enlarge=enlarge,
                output_format=body.output_format,
                size=size,
            )
            events = stream.events(snapshot, self.model)
            opening = await while_connected(call.http, anext(events, b""))
            location = f"/v1/predictions/{snapshot.prediction.id}"
            return answer_events(behind(opening, events), held, location)

    async def _record(
        self, inputs: Sequence[ImageInput], *, is_repeatable: bool
    ) -> InferenceRequest:
        """Returns the request for a prediction that draws the images."""
        body, model, path = self.body, self.model, self.call.route
        elsewhere: dict[str, Any] = dict.fromkeys(("images", "mask", *GUIDE_IMAGES), True)
        elsewhere[MORE_CONTROLS] = {"__all__": {CONTROL_IMAGE}}
        fields = body.model_dump(mode="json", exclude_unset=True, exclude=elsewhere)
        digest_parts: list[object] = [path, model.name, fields]
        if inputs[0].sources:
            sources = [
                await self.source_images.store_large_source(source) for source in inputs[0].sources
            ]
            inputs = [image.with_sources(sources) for image in inputs]
            digest_parts += [
                source.object_key or hashlib.sha256(source.data or b"").hexdigest()
                for source in sources
            ]
        read = Inputs(inputs, fields, True, is_repeatable, body.output_format, body.upscale)
        model, read = plan_images(read, model, self.catalog)
        digest = digest_of(json.dumps(digest_parts, sort_keys=True))
        return self.recording.request(self.call, model, read, digest=digest, endpoint=path)


@injectable
@dataclass(frozen=True, slots=True)
class ImageRequests:
    """Draws images for requests, and returns them all at once or as a stream."""

    catalog: Catalog
    inference: Inference
    recording: Recording
    storage: Storage
    source_images: SourceImages
    objects: ObjectStore
    image_codec: ImageCodec
    url_signer: UrlSigner
    event_streams: EventStreams
    predictions: Predictions
    progress: PredictionProgress
    generation_streams: GenerationStreams

    def use_model(self, call: ModelCall, body: ImageBody) -> Model:
        """Returns the model named in a body, and records that the request uses it.

        Raises:
            UnknownModel: the image model does not exist.
            ModelForbidden: the key may not use the model.
        """
        model = model_of(body, self.catalog)
        call.use(model)
        return model

    def draft(self, call: ModelCall, body: ImageBody, model: Model) -> ImageDraft:
        """Returns a draft of the requested images, without storing their files."""
        quota = self.storage.quota_of(call.caller, "images")
        owner = self.inference.file_owner(call, model, quota, call.answer_by_s(model))
        return ImageDraft(body, model, size_in(body, model), owner, self.source_images)

    async def answer(
        self, call: ModelCall, body: ImageBody, model: Model, first: ImageInput
    ) -> Response:
        """Draws a request's images, and returns the response.

        Args:
            first: the first image, with its files.
        """
        encoder = ImageEncoder(call, body, self.objects, self.image_codec, self.url_signer)
        answer = ImageAnswer(
            call, body, model, first, self.catalog, self.recording, self.source_images, encoder
        )
        if body.stream:
            return await answer.stream(
                self.event_streams, self.predictions, self.progress, self.generation_streams
            )
        return await answer.whole()


router = Router(scope="images", route_class=ImageRoute)


@router.post(
    "/v1/images/generations",
    summary="Create images from a prompt",
    body=GenerationBody,
    reply=ImagesReply,
    headers=OWN_HEADERS,
    is_streamed=True,
    lines=GenerationsEndpoint(),
)
async def create_images(call: ModelCall, images: ImageRequests) -> Response:
    """Responds once all images are ready or, with `stream`, sends each image as it is ready.

    With a seed, the same request returns the same images, usually from the cache. With an
    `Idempotency-Key`, stream events have IDs. To continue after an event, on any instance, send the
    same request with the same key and the event's ID as `Last-Event-ID`.
    """
    body = await call.read_json(GenerationBody)
    model = images.use_model(call, body)
    check_guides(body, model)
    check_accepted(body, model, "text")
    first = first_image(body, model, size_in(body, model))
    if names_files(body, first):
        images.inference.check_room(call, model, body.n)
        draft = images.draft(call, body, model)
        first = await while_connected(call.http, _with_files(draft, body))
    return await images.answer(call, body, model, first)


async def _with_files(draft: ImageDraft, body: GenerationBody) -> ImageInput:
    """Returns the first image, with the files for its guides and adapter."""
    await draft.fetch(guide_urls(body))
    return await draft.first()
