"""POST /v1/ocr in the shape of Mistral's OCR API: a document, read page by page.

A model of one's own reads it, whose entry says so (`api: ocr`). What it takes and gives is in
shared/tasks/custom.py. It yields pages, so as a prediction a document is also a stream. Its unit of
work is a page. https://docs.mistral.ai/api/endpoint/ocr
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import PurePath
from typing import Annotated, Any, Literal, cast

import msgspec
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
)
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.bodies import Body, ItemId
from api.errors import (
    ERROR_MAPPINGS,
    ClientGone,
    encode_error,
    headers_for,
    set_error_code,
    to_bad_input,
)
from api.http.fast_route import FastRoute
from api.http.openapi import inference_body, inference_responses
from api.http.request import ApiRequest, open_request, while_connected
from api.inputs.source_images import ACCEPTED, ImageCaller, SourceImages
from api.inputs.storage import StorageQuota
from api.openai.endpoint import Endpoint, LineCaller, LineRequest, ReplyTools
from api.openai.images import read_blob
from api.problem_details import UNPROCESSABLE
from api.tasks.custom import FileInput, add_files, in_fields, input_of_fields
from shared.blob import Blob
from shared.catalog import Catalog, Model
from shared.errors import BadInput, ModelFailed, PenstockError
from shared.messages import ItemOutcome
from shared.stores.objects import ObjectStore
from shared.tasks.custom import CustomInput, CustomResult, FilePlace

DOCUMENT, SIZE_METRIC = "document", "doc_size_bytes"
MAX_PAGE_RANGES = 1000
MAX_IMAGES_BYTES = 48 * 1024 * 1024
"""Of all images of an answer. In base64 they are a third more."""
_RANGES = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_REPLY_BYTES, _REPLY_WITH_IMAGES_BYTES = 256 * 1024, 4 * 1024 * 1024
_ID_REFERENCE = re.compile(r"(!?)\[([^\]\s]{1,100})\]\(\2\)")
"""A reference in markdown to an image or a table, by its id."""
_LINE_URLS = ("data:", "https://", "http://", "/v1/files/")
_encode = msgspec.json.Encoder().encode


class DocumentUrl(Body):
    """A document by its URL."""

    type: Literal["document_url"] = "document_url"
    document_url: str = Field(
        min_length=1,
        description="An https URL, a `data:` URI, or the URL of a file of this API.",
    )
    document_name: str | None = Field(None, description="Accepted, without effect.")


class ImageAddress(Body):
    """The URL of an image."""

    url: str = Field(min_length=1)
    detail: str | None = Field(None, description="Accepted, without effect.")


class ImageUrl(Body):
    """An image by its URL."""

    type: Literal["image_url"] = "image_url"
    image_url: Annotated[
        Annotated[str, Tag("text:"), Field(min_length=1)] | Annotated[ImageAddress, Tag("object:")],
        Discriminator(lambda value: "text:" if isinstance(value, str) else "object:"),
    ]


class UploadedDocument(Body):
    """A file of this API."""

    type: Literal["file"] = "file"
    file_id: ItemId


def _kind_of(value: Any) -> str | None:
    """Returns the kind of a document. Its type may be left out."""
    if not isinstance(value, dict):
        return None
    kinds = ("document_url", "image_url", "file")
    by_field = {"document_url": "document_url", "image_url": "image_url", "file_id": "file"}
    kind = value.get("type") or next((by_field[name] for name in by_field if name in value), None)
    return f"{kind}:" if kind in kinds else None


_Document = Annotated[
    Annotated[DocumentUrl, Tag("document_url:")]
    | Annotated[ImageUrl, Tag("image_url:")]
    | Annotated[UploadedDocument, Tag("file:")],
    Discriminator(
        _kind_of,
        custom_error_type="document_type",
        custom_error_message="type must be document_url, image_url or file, with that field",
    ),
]


def _refuse_annotation(value: object) -> None:
    if value is not None:
        raise ValueError(
            "annotations are made by a language model that sees images, and none is served "
            "here; leave it out, or send null"
        )


_NoAnnotation = Annotated[None, BeforeValidator(_refuse_annotation)]
_Page = Annotated[int, Field(ge=0, le=99_999)]
_Pages = Annotated[
    Annotated[list[_Page], Field(max_length=10_000), Tag("list:")] | Annotated[str, Tag("text:")],
    Discriminator(lambda value: "list:" if isinstance(value, list) else "text:"),
]


class OcrBody(Body):
    """A document that is read."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "ocr",
                "document": {
                    "type": "document_url",
                    "document_url": "https://example.com/report.pdf",
                },
                "pages": "0-3,5",
            }
        }
    )

    model: str | None = Field(
        None, description="Default: the first model of the catalog with `api: ocr`."
    )
    document: _Document = Field(description="PDF, PNG, JPEG, TIFF or WebP.")
    id: ItemId | None = Field(None, description="Accepted, without effect.")
    pages: _Pages | None = Field(
        None, description="Which pages, counted from 0: a list, or `0-3,5`. Default: all."
    )
    table_format: Literal["markdown", "html"] | None = Field(
        None, description="Of tables beside the markdown. Default: they are in it."
    )
    include_image_base64: bool | None = Field(
        None, description="Whether images are in the answer, as `data:` URIs."
    )
    image_limit: int | None = Field(
        None, ge=0, le=10_000, description="The most images of all pages together."
    )
    image_min_size: int | None = Field(
        None, ge=1, le=10_000, description="The least width and height of an image, in pixels."
    )
    include_blocks: bool | None = Field(
        None, description="Whether each page has its parts with their places."
    )
    confidence_scores_granularity: Literal["page", "block", "word"] | None = None
    extract_header: bool | None = Field(
        None, description="Whether headers are beside the markdown."
    )
    extract_footer: bool | None = Field(
        None, description="Whether footers are beside the markdown."
    )
    bbox_annotation_format: _NoAnnotation = None
    document_annotation_format: _NoAnnotation = None
    document_annotation_prompt: _NoAnnotation = None

    @field_validator("pages")
    @classmethod
    def _are_ranges(cls, value: list[int] | str | None) -> list[int] | str | None:
        if isinstance(value, str):
            plain = value.replace(" ", "")
            if plain.count(",") >= MAX_PAGE_RANGES or not _RANGES.fullmatch(plain):
                raise ValueError("numbers from 0 on and ranges are needed, as 0-3,5")
        return value

    @property
    def wanted_pages(self) -> str | None:
        """The pages as a class takes them: equal ones are written alike. None: all."""
        if not self.pages:
            return None
        return _ranges_of(self.pages)

    @property
    def url(self) -> str:
        """Where the document is. Files of this API are below `/v1/files/`."""
        match self.document:
            case DocumentUrl():
                return self.document.document_url
            case ImageUrl():
                address = self.document.image_url
                return address if isinstance(address, str) else address.url
            case UploadedDocument():
                return f"/v1/files/{self.document.file_id}"


def _ranges_of(pages: Sequence[int] | str) -> str:
    """Returns numbers and ranges in order, each page once: `0-3,5`."""
    spans = [(page, page) for page in pages if isinstance(page, int)]
    if isinstance(pages, str):
        parts = [part.partition("-") for part in pages.replace(" ", "").split(",")]
        spans = [(int(first), int(last or first)) for first, _, last in parts]
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and merged[-1][1] + 1 >= first and last >= first:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in merged)


class OcrDimensions(msgspec.Struct):
    """The size of a page as it was looked at. Coordinates are its pixels."""

    dpi: int
    height: int
    width: int


class _Place(msgspec.Struct, kw_only=True):
    top_left_x: int
    top_left_y: int
    bottom_right_x: int
    bottom_right_y: int


class OcrImage(_Place, kw_only=True):
    """An image on a page. In the markdown is a reference to its id."""

    id: str
    image_base64: str | None = None
    image_annotation: None = None


class OcrWordScore(msgspec.Struct):
    """How sure a word is, from 0 to 1, and where it begins in the markdown."""

    text: str
    confidence: float
    start_index: int


class OcrPageScores(msgspec.Struct, omit_defaults=True):
    """How sure a page is, by its words."""

    average_page_confidence_score: float
    minimum_page_confidence_score: float
    word_confidence_scores: list[OcrWordScore] | None = None


class OcrBlockScores(msgspec.Struct):
    """How sure a block is, by its words. Null: it has none."""

    average_content_confidence_score: float | None = None
    minimum_content_confidence_score: float | None = None
    block_type_confidence_score: float | None = None


class OcrTable(msgspec.Struct):
    """A table beside the markdown, where a reference to its id is."""

    id: str
    content: str
    format: Literal["markdown", "html"]


_BlockKind = Literal[
    "text",
    "title",
    "list",
    "table",
    "image",
    "header",
    "footer",
    "caption",
    "equation",
    "code",
    "references",
    "aside_text",
    "signature",
]


class OcrBlock(_Place, kw_only=True, omit_defaults=True):
    """A part of a page, with its place."""

    type: _BlockKind
    content: str
    image_id: str | None = None
    table_id: str | None = None
    confidence_scores: OcrBlockScores | None = None


class OcrPage(msgspec.Struct, omit_defaults=True):
    """A page that was read."""

    index: int
    markdown: str
    images: list[OcrImage]
    dimensions: OcrDimensions | None
    tables: list[OcrTable] | None = None
    hyperlinks: list[str] | None = None
    header: str | None = None
    footer: str | None = None
    confidence_scores: OcrPageScores | None = None
    blocks: list[OcrBlock] | None = None


class OcrUsage(msgspec.Struct):
    """What a document counts as: the pages that were read."""

    pages_processed: int
    doc_size_bytes: int | None


class OcrReply(msgspec.Struct):
    """A document that was read."""

    pages: list[OcrPage]
    model: str
    usage_info: OcrUsage
    document_annotation: None = None


class OcrFieldError(msgspec.Struct):
    """A field that is wrong."""

    loc: list[str]
    msg: str
    type: str


class OcrErrorReply(msgspec.Struct, omit_defaults=True):
    """The body of every error. A wrong field is in `detail` too, as Mistral's client reads it."""

    message: str
    type: str
    param: str | None
    code: str
    detail: list[OcrFieldError] | None = None


def ocr_error(error: Exception) -> tuple[PenstockError, int, bytes]:
    """Returns an error, its status and its body. What is wrong with a request is 422."""
    match error:
        case PenstockError():
            known = error
        case ValidationError() | RequestValidationError():
            known = to_bad_input(error)
        case ClientDisconnect():
            known = ClientGone()
        case _:
            known = PenstockError(str(error))
    mapping = ERROR_MAPPINGS.get(known.code, ERROR_MAPPINGS["internal"])
    status = 422 if known.code in UNPROCESSABLE else mapping.status
    reply = OcrErrorReply(known.public_message, mapping.type, known.field, known.code)
    if status == 422:
        where = ["body", *([known.field] if known.field else [])]
        reply.detail = [OcrFieldError(where, known.public_message, known.code)]
    return known, status, encode_error(reply)


class OcrRoute(FastRoute):
    """A route whose errors have Mistral's shape."""

    async def answer_error(self, request: Request, error: Exception) -> Response:
        """Returns an error in that shape."""
        set_error_code(request, error)
        known, status, body = ocr_error(error)
        return Response(body, status, headers_for(known), "application/json")


_CLASS_FIELDS = (
    *("table_format", "include_image_base64", "image_limit", "image_min_size", "include_blocks"),
    *("confidence_scores_granularity", "extract_header", "extract_footer"),
)


def _checked(body: OcrBody, model: Model) -> tuple[CustomInput, list[FileInput]]:
    """Returns the input of a class, and its document.

    What a caller turns off is left out, so that equal wishes are equal inputs.

    Raises:
        pydantic.ValidationError: the class does not take a value.
        BadInput: the class does not take a field.
    """
    values = {name: getattr(body, name) or None for name in _CLASS_FIELDS}
    if body.image_limit == 0:
        values["image_limit"] = 0
    values |= {DOCUMENT: body.url, "pages": body.wanted_pages}
    custom_input, files = input_of_fields(values, model, {})
    custom_input.is_streamed = False
    return custom_input, files


async def _with_document(
    checked: tuple[CustomInput, list[FileInput]], owner: ImageCaller, images: SourceImages
) -> CustomInput:
    """Returns the input with its document. What a file is called changes nothing.

    Raises:
        BadInput: it can't be had.
        Overloaded: too many files are being fetched.
        Unavailable: the object store is out of reach.
    """
    custom_input, [(at, url)] = checked
    if url.startswith("/"):
        url = owner.base_url + url
    await add_files(custom_input, [(at, url)], owner, images)
    custom_input.places[:] = [FilePlace([DOCUMENT], DOCUMENT)]
    custom_input.files[0].media_type = "application/octet-stream"
    return custom_input


async def _reply(outcomes: Sequence[ItemOutcome], model: Model, objects: ObjectStore) -> OcrReply:
    """Returns the answer.

    Raises:
        ModelFailed: what the class gave are no pages, or their images are too large.
        Unavailable: the object store is out of reach.
    """
    (outcome,) = outcomes
    result = outcome.result
    if not isinstance(result, CustomResult):
        raise PenstockError(f"{model.name} returned a result that is not its own; a bug")
    images, size = [], 0
    for blob in result.files:
        data = await read_blob(objects, blob, "image")
        size += len(data)
        if size > MAX_IMAGES_BYTES:
            raise BadInput(
                "include_image_base64: the images have more than the "
                f"{MAX_IMAGES_BYTES} bytes of an answer; ask for fewer pages",
                field="include_image_base64",
            )
        images.append(Blob(blob.media_type, data=data))
    output = result.with_blobs(images).to_output("", lambda key, media_type="": "")
    try:
        pages = msgspec.convert(output, list[OcrPage])
    except msgspec.ValidationError as error:
        raise ModelFailed(f"the model gave no pages: {error}") from error
    _number(pages)
    doc_size_bytes = result.metrics.get(SIZE_METRIC)
    usage = OcrUsage(result.work, doc_size_bytes if isinstance(doc_size_bytes, int) else None)
    return OcrReply(pages, model.name, usage)


def _number(pages: Sequence[OcrPage]) -> None:
    """Numbers images and tables from page to page. A class numbers those of each page from 0."""
    images, tables = count(), count()
    for page in pages:
        names = {one.id: f"img-{next(images)}{PurePath(one.id).suffix}" for one in page.images}
        for table in page.tables or ():
            names[table.id] = f"tbl-{next(tables)}{PurePath(table.id).suffix}"
        if any(name != new for name, new in names.items()):
            _rename(page, names)


def _rename(page: OcrPage, names: Mapping[str, str]) -> None:
    """Gives images and tables other ids, also where the page refers to them."""
    shifts: list[tuple[int, int]] = []

    def renamed(match: re.Match[str]) -> str:
        name = names.get(match[2], match[2])
        shifts.append((match.start(), 2 * (len(name) - len(match[2]))))
        return f"{match[1]}[{name}]({name})"

    page.markdown = _ID_REFERENCE.sub(renamed, page.markdown)
    scores = page.confidence_scores and page.confidence_scores.word_confidence_scores
    for word in scores or ():
        word.start_index += sum(shift for at, shift in shifts if at < word.start_index)
    for image in page.images:
        image.id = names[image.id]
    for table in page.tables or ():
        table.id = names[table.id]
    for block in page.blocks or ():
        block.content = _ID_REFERENCE.sub(renamed, block.content)
        block.image_id = names.get(block.image_id or "", block.image_id)
        block.table_id = names.get(block.table_id or "", block.table_id)


class OcrEndpoint(Endpoint):
    """Lines whose body is that of POST /v1/ocr."""

    path = "/v1/ocr"

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item. Its document is loaded when it runs."""
        body = OcrBody.model_validate_json(data, strict=True)
        model = catalog.serving("ocr", body.model)
        custom_input, [(_, url)] = _checked(body, model)
        if not url.startswith(_LINE_URLS):
            raise BadInput(f"{DOCUMENT}: {ACCEPTED}", field=DOCUMENT)
        reply_bytes = _REPLY_WITH_IMAGES_BYTES if body.include_image_base64 else _REPLY_BYTES
        return LineRequest(body, model, [custom_input], model.deterministic, reply_bytes)

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[CustomInput]:
        """Loads the document of the line."""
        owner = ImageCaller(
            caller.tenant,
            StorageQuota(caller.tenant, 0, DOCUMENT),
            caller.base_url,
            deadline_s=caller.deadline_s,
            keep_s=0,
        )
        checked = _checked(cast(OcrBody, request.body), request.model)
        return [await _with_document(checked, owner, caller.source_images)]

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the pages."""
        return _encode(await _reply(outcomes, request.model, tools.objects))


router = APIRouter(route_class=OcrRoute)


@router.post(
    "/v1/ocr",
    summary="Read a document",
    openapi_extra=inference_body(OcrBody),
    responses=inference_responses(OcrReply, error=OcrErrorReply),
)
async def create_ocr(request: Request) -> Response:
    """Answers when all pages are read.

    As a prediction of the same model, `GET /v1/predictions/{id}/stream` has each page as soon as it
    is read.
    """
    call = open_request(request)
    body = await call.read_json(OcrBody)
    model = call.serving("ocr", body.model)
    with in_fields(model, DOCUMENT, "pages", {}):
        checked = _checked(body, model)
        call.check_room(model, 1)
        loading = _with_document(checked, _owner(call, model), call.dependencies.source_images)
        one = await while_connected(request, loading)
        async with call.inferred(model, [one], is_repeatable=model.deterministic) as response:
            reply = await _reply(response.outcomes, model, call.dependencies.objects)
    return Response(_encode(reply), media_type="application/json")


def _owner(call: ApiRequest, model: Model) -> ImageCaller:
    return ImageCaller(
        call.tenant,
        call.storage_quota(DOCUMENT),
        call.base_url,
        call.answer_by_s(model),
        keep_s=0,
    )
