"""POST /v1/ocr as in Mistral's OCR API: reads a document page by page.

A custom model with `api: ocr` in its entry reads the document. Its inputs and outputs are described
in shared/models/tasks/custom.py. The model yields pages, so a document processed as a prediction
can also be streamed. Work is measured in pages. https://docs.mistral.ai/api/endpoint/ocr

A flow can also read the document, with one item per page. Its output contains a separate document
for each page, plus the page numbers.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, count
from pathlib import PurePath
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.batches.documents import LineUsage
from api.batches.endpoint import Endpoint, LineCaller, LineRequest, ReplyTools
from api.dispatch.request import InferenceRequest
from api.errors import (
    ERROR_MAPPINGS,
    encode_error,
    headers_for,
    set_error_code,
    to_known_error,
)
from api.http.call import ModelCall
from api.http.connection import while_connected
from api.http.fast_route import FastRoute
from api.http.inference import Inference
from api.http.recording import Recording
from api.http.router import Router
from api.inputs.source_images import ACCEPTED, ImageCaller, SourceImages
from api.inputs.storage import Storage
from api.mistral.ocr_schemas import (
    OcrBody,
    OcrErrorReply,
    OcrFieldError,
    OcrPage,
    OcrReply,
    OcrUsage,
    PagesApart,
)
from api.openai.images import read_blob
from api.predictions.creation import PredictionSnapshot, digest_of
from api.problem_details import UNPROCESSABLE
from api.tasks.base import Inputs, check_results
from api.tasks.custom import FieldNames, add_files, input_of_fields
from shared.errors import BadInput, ModelFailed, PenstockError, error_for_code
from shared.flows.engine import plan_of
from shared.messages import ItemOutcome
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Flow, Model
from shared.models.flow_plan import INPUT, MAX_STEP_ITEMS, FlowPlan, FlowStep, step_of
from shared.models.tasks import Result
from shared.models.tasks.custom import CustomInput, CustomResult, FilePlace
from shared.stores.objects import ObjectStore

PATH = "/v1/ocr"
DOCUMENT, SIZE_METRIC = "document", "doc_size_bytes"
MAX_IMAGES_BYTES = 48 * 1024 * 1024
"""Maximum total size, in bytes, of the images in a response. Base64 adds a third."""
_REPLY_BYTES, _REPLY_WITH_IMAGES_BYTES = 256 * 1024, 4 * 1024 * 1024
_ID_REFERENCE = re.compile(r"(!?)\[([^\]\s]{1,100})\]\(\2\)")
"""A markdown reference to an image or a table, by ID."""
_LINE_URLS = ("data:", "https://", "http://", "/v1/files/")
_PAGE_OF_ONE = re.compile(r"^page 0: ")
"""Prefix for errors about a one-page document."""
_CLASS_FIELDS = (
    *("table_format", "include_image_base64", "image_limit", "image_min_size", "include_blocks"),
    *("confidence_scores_granularity", "extract_header", "extract_footer"),
)
_encode = msgspec.json.Encoder().encode


def ocr_error(error: Exception) -> tuple[PenstockError, int, bytes]:
    """Returns an error's status and body. Invalid requests get a 422."""
    known = to_known_error(error)
    mapping = ERROR_MAPPINGS.get(known.code, ERROR_MAPPINGS["internal"])
    status = 422 if known.code in UNPROCESSABLE else mapping.status
    reply = OcrErrorReply(known.public_message, mapping.type, known.field, known.code)
    if status == 422:
        where = ["body", *([known.field] if known.field else [])]
        reply.detail = [OcrFieldError(where, known.public_message, known.code)]
    return known, status, encode_error(reply)


class OcrRoute(FastRoute):
    """A route whose errors use Mistral's format."""

    error_reply = OcrErrorReply

    async def answer_error(self, request: Request, error: Exception) -> Response:
        """Returns an error in Mistral's format."""
        set_error_code(request, error)
        known, status, body = ocr_error(error)
        return Response(body, status, headers_for(known), "application/json")


def _read_fields(body: OcrBody, model: Model) -> CustomInput:
    """Returns the input for a class or flow, without its document.

    Disabled options are omitted, so that equivalent requests have identical inputs.

    Raises:
        pydantic.ValidationError: the class does not accept a value.
        BadInput: the class does not accept a field.
    """
    values = {name: getattr(body, name) or None for name in _CLASS_FIELDS}
    if body.image_limit == 0:
        values["image_limit"] = 0
    values |= {DOCUMENT: body.url, "pages": body.wanted_pages}
    ocr_input, _ = input_of_fields(values, model, {})
    ocr_input.is_streamed = False
    return ocr_input


async def _load_document(
    ocr_input: CustomInput, url: str, owner: ImageCaller, images: SourceImages
) -> None:
    """Loads the document into an input.

    The document's name is dropped because it does not affect the result.

    Raises:
        BadInput: the document can't be loaded.
        Overloaded: too many files are being fetched.
        Unavailable: the object store is unreachable.
    """
    if url.startswith("/"):
        url = owner.base_url + url
    await add_files(ocr_input, [([DOCUMENT], url)], owner, images)
    ocr_input.places[:] = [FilePlace([DOCUMENT], DOCUMENT)]
    ocr_input.files[0].media_type = "application/octet-stream"


async def _build_reply(
    result: Result | None, model: Model, objects: ObjectStore, body: OcrBody
) -> OcrReply:
    """Returns the response in Mistral's format.

    Raises:
        ModelFailed: the class or flow did not return pages.
        BadInput: the pages' images are too large.
        Unavailable: the object store is unreachable.
    """
    (document,) = check_results([result], CustomResult, model)
    images = await _read_images(document, objects)
    pages, size_bytes = _parse_pages(document.with_blobs(images))
    _number_images_and_tables(pages, body.image_limit)
    return OcrReply(pages, model.name, OcrUsage(_count_pages(document, model), size_bytes))


async def _read_images(document: CustomResult, objects: ObjectStore) -> list[Blob]:
    """Returns all pages' images, with their data."""
    images, size = [], 0
    for blob in document.files:
        data = await read_blob(objects, blob, "image")
        size += len(data)
        if size > MAX_IMAGES_BYTES:
            raise BadInput(
                "include_image_base64: the images' total size exceeds the maximum of "
                f"{MAX_IMAGES_BYTES} bytes; request fewer pages",
                field="include_image_base64",
            )
        images.append(Blob(blob.media_type, data=data))
    return images


def _parse_pages(document: CustomResult) -> tuple[list[OcrPage], int | None]:
    """Returns a document's pages, and its size in bytes if known."""
    output = document.to_output("", lambda key, media_type="": "")
    try:
        if isinstance(output, dict):
            numbered = msgspec.convert(output, PagesApart)
            pages, size_bytes = _join_pages(numbered), numbered.doc_size_bytes
        else:
            pages = msgspec.convert(output, list[OcrPage])
            size_bytes = document.metrics.get(SIZE_METRIC)
    except msgspec.ValidationError as error:
        raise ModelFailed(f"the model did not return valid pages: {error}") from error
    return pages, size_bytes if isinstance(size_bytes, int) else None


def _count_pages(result: CustomResult, model: Model) -> int:
    """Returns the number of pages read."""
    if isinstance(model, Flow):
        return len(result.output["pages"] if isinstance(result.output, dict) else result.output)
    return result.work


def _join_pages(numbered: PagesApart) -> list[OcrPage]:
    """Returns the pages from one-page documents, with their page numbers.

    Raises:
        ModelFailed: there are too many or too few pages.
    """
    if [len(pages) for pages in numbered.pages] != [1] * len(numbered.numbers):
        raise ModelFailed("the flow did not return every page exactly once")
    pages = [page for (page,) in numbered.pages]
    for page, number in zip(pages, numbered.numbers, strict=True):
        page.index = number
    return pages


def _number_images_and_tables(pages: Sequence[OcrPage], max_images: int | None) -> None:
    """Numbers images and tables across pages. A class starts numbering at 0 on each page.

    Images beyond `max_images` are dropped, because a flow applies the limit to each page
    separately.
    """
    images, tables, room = count(), count(), sys.maxsize if max_images is None else max_images
    for page in pages:
        names = {image.id: "" for image in page.images[room:]}
        page.images, room = page.images[:room], room - len(page.images[:room])
        names |= {
            image.id: f"img-{next(images)}{PurePath(image.id).suffix}" for image in page.images
        }
        for table in page.tables or ():
            names[table.id] = f"tbl-{next(tables)}{PurePath(table.id).suffix}"
        if any(name != new for name, new in names.items()):
            _rename(page, names)


def _rename(page: OcrPage, names: Mapping[str, str]) -> None:
    """Replaces image and table IDs, including references to them on the page.

    Does nothing if `names` is empty.
    """
    shifts: list[tuple[int, int]] = []

    def rename_reference(match: re.Match[str]) -> str:
        name = names.get(match[2], match[2])
        reference = f"{match[1]}[{name}]({name})" if name else ""
        shifts.append((match.start(), len(reference) - len(match[0])))
        return reference

    page.markdown = _ID_REFERENCE.sub(rename_reference, page.markdown)
    scores = page.confidence_scores and page.confidence_scores.word_confidence_scores
    before = [0, *accumulate(shift for _, shift in shifts)]
    places = [at for at, _ in shifts]
    for word in scores or ():  # a page may have as many references as words
        word.start_index += before[bisect_left(places, word.start_index)]
    for image in page.images:
        image.id = names[image.id]
    for table in page.tables or ():
        table.id = names[table.id]
    if page.blocks:
        page.blocks = [block for block in page.blocks if names.get(block.image_id or "") != ""]
    for block in page.blocks or ():
        block.content = _ID_REFERENCE.sub(rename_reference, block.content)
        block.image_id = names.get(block.image_id or "", block.image_id)
        block.table_id = names.get(block.table_id or "", block.table_id)


class OcrEndpoint(Endpoint):
    """Batch lines with the same body as POST /v1/ocr."""

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item. The document is loaded when the line runs."""
        body = OcrBody.model_validate_json(data, strict=True)
        model = catalog.serving("ocr", body.model)
        ocr_input = _read_fields(body, model)
        if not body.url.startswith(_LINE_URLS):
            raise BadInput(f"{DOCUMENT}: {ACCEPTED}", field=DOCUMENT)
        reply_bytes = _REPLY_WITH_IMAGES_BYTES if body.include_image_base64 else _REPLY_BYTES
        return LineRequest(body, model, [ocr_input], model.deterministic, reply_bytes)

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[CustomInput]:
        """Loads the document that the line refers to."""
        body, owner = cast(OcrBody, request.body), caller.file_owner(DOCUMENT)
        ocr_input = _read_fields(body, request.model)
        await _load_document(ocr_input, body.url, owner, caller.source_images)
        return [ocr_input]

    def words(self, request: LineRequest) -> AbstractContextManager[None]:
        """Makes errors refer to the body's fields."""
        return _names_for(request.model).translate_errors()

    def failure(self, request: LineRequest, snapshot: PredictionSnapshot) -> PenstockError:
        """Returns the reason a flow failed, with the affected page's number."""
        return _failure_of(cast(OcrBody, request.body), snapshot)

    def usage(
        self,
        request: LineRequest,
        outcomes: Sequence[ItemOutcome],
        answered: Sequence[ItemOutcome],
    ) -> LineUsage:
        result = cast(CustomResult, answered[0].result)
        pages = _count_pages(result, request.model)
        return super().usage(request, outcomes, answered)._replace(pages=pages)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        (outcome,) = outcomes
        body = cast(OcrBody, request.body)
        return _encode(await _build_reply(outcome.result, request.model, tools.objects, body))


router = Router(scope="ocr", route_class=OcrRoute)


@router.post(PATH, summary="Read a document", body=OcrBody, reply=OcrReply, lines=OcrEndpoint())
async def create_ocr(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    storage: Storage,
    source_images: SourceImages,
    objects: ObjectStore,
) -> Response:
    """Responds once all pages have been read.

    For a prediction with the same model, `GET /v1/predictions/{id}/stream` sends each page as soon
    as it is read. If a flow reads the document, `location` contains the prediction's URL.
    """
    body = await call.read_json(OcrBody)
    model = call.serving(catalog, "ocr", body.model)
    with _names_for(model).translate_errors():
        ocr_input = _read_fields(body, model)
        inference.check_room(call, model, 1)
        quota = storage.quota_of(call.caller, DOCUMENT)
        owner = inference.file_owner(call, model, quota, call.answer_by_s(model))
        loading = _load_document(ocr_input, body.url, owner, source_images)
        await while_connected(call.http, loading)
        async with recording.compute(
            call,
            model,
            [ocr_input],
            partial(_run_request, call, model, ocr_input, body, recording),
            is_repeatable=model.deterministic,
            failure=partial(_failure_of, body),
        ) as delivery:
            reply = await _build_reply(delivery.outcomes[0].result, model, objects, body)
    return Response(_encode(reply), media_type="application/json")


async def _run_request(
    call: ModelCall, flow: Model, ocr_input: CustomInput, body: OcrBody, recording: Recording
) -> InferenceRequest:
    """Returns the request for a flow's prediction."""
    fields = body.model_dump(mode="json", exclude_unset=True, exclude={DOCUMENT})
    shown_input = fields | {DOCUMENT: {"type": body.document.type}}
    read = Inputs([ocr_input], shown_input, is_list=False, is_repeatable=flow.deterministic)
    digest = digest_of(json.dumps([flow.name, PATH, repr(ocr_input.cache_form())]))
    return recording.request(call, flow, read, digest=digest, endpoint=PATH)


def _names_for(model: Model) -> FieldNames:
    return FieldNames(model, DOCUMENT)


def _failure_of(body: OcrBody, snapshot: PredictionSnapshot) -> PenstockError:
    """Returns the reason a flow failed. Errors about a page become errors about the document."""
    plan = plan_of(snapshot.prediction)
    failure, reply = snapshot.failure, snapshot.record.reply
    if isinstance(failure, BadInput):
        return failure  # the step's error is about one of the flow's inputs
    for outcome in reply.outcomes if reply is not None else ():
        error, step = outcome.error, plan.steps[step_of(outcome.index)]
        if error is None or step.has_default:
            continue
        position = outcome.index % MAX_STEP_ITEMS
        known = error_for_code(error.code, error.message, error.field)
        if isinstance(known, BadInput) and _is_page(step, error.field, position, plan):
            reason = error.message.removeprefix(f"{error.field}: ")
            where = f"{DOCUMENT}: page {body.number_of(position)}"
            return type(known)(f"{where}: {_PAGE_OF_ONE.sub('', reason)}", field=DOCUMENT)
        break
    return failure


def _is_page(step: FlowStep, field: str | None, position: int, plan: FlowPlan) -> bool:
    """Returns whether an item's input is a page that the first step created from the document."""
    if step.for_each is None:
        return False
    first = {candidate.id for candidate in plan.steps if not candidate.depends_on}
    sources = {origin.name for origin in step.origins_of(field or "", position)} - {INPUT}
    return len(sources) == 1 and sources <= first
