"""Request, response, and error bodies for POST /v1/ocr, as in Mistral's OCR API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from api.bodies import Body, ItemId

MAX_PAGE_RANGES = 1000
_RANGES = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")

_Page = Annotated[int, Field(ge=0, le=99_999)]
_Pages = Annotated[
    Annotated[list[_Page], Field(max_length=10_000), Tag("list:")] | Annotated[str, Tag("text:")],
    Discriminator(lambda value: "list:" if isinstance(value, list) else "text:"),
]

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


class DocumentUrl(Body):
    """A document specified by URL."""

    type: Literal["document_url"] = "document_url"
    document_url: str = Field(
        min_length=1,
        description="An https URL, a `data:` URI, or the URL of a file uploaded to this API.",
    )
    document_name: str | None = Field(None, description="Accepted, without effect.")


class ImageAddress(Body):
    """An image's URL."""

    url: str = Field(min_length=1)
    detail: str | None = Field(None, description="Accepted, without effect.")


class ImageUrl(Body):
    """An image specified by URL."""

    type: Literal["image_url"] = "image_url"
    image_url: Annotated[
        Annotated[str, Tag("text:"), Field(min_length=1)] | Annotated[ImageAddress, Tag("object:")],
        Discriminator(lambda value: "text:" if isinstance(value, str) else "object:"),
    ]


class UploadedDocument(Body):
    """A file uploaded to this API."""

    type: Literal["file"] = "file"
    file_id: ItemId


def _kind_of(value: Any) -> str | None:
    """Returns a document's kind. The document's type may be omitted."""
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
        custom_error_message=(
            "type must be document_url, image_url or file, with the field of the same name"
        ),
    ),
]


def _refuse_annotation(value: object) -> None:
    if value is not None:
        raise ValueError(
            "annotations require a language model that accepts images, which this API does "
            "not serve; omit this field or send null"
        )


_NoAnnotation = Annotated[None, BeforeValidator(_refuse_annotation)]


class OcrBody(Body):
    """A document to read."""

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
        None, description="Default: the first model in the catalog with `api: ocr`."
    )
    document: _Document = Field(description="PDF, PNG, JPEG, TIFF or WebP.")
    id: ItemId | None = Field(None, description="Accepted, without effect.")
    pages: _Pages | None = Field(
        None, description="Page numbers from 0, as a list or as `0-3,5`. Default: all pages."
    )
    table_format: Literal["markdown", "html"] | None = Field(
        None, description="Format of tables outside the markdown. Default: part of the markdown."
    )
    include_image_base64: bool | None = Field(
        None, description="True to include images in the answer as `data:` URIs."
    )
    image_limit: int | None = Field(
        None, ge=0, le=10_000, description="Maximum number of images on all pages together."
    )
    image_min_size: int | None = Field(
        None, ge=1, le=10_000, description="Minimum width and height of an image, in pixels."
    )
    include_blocks: bool | None = Field(
        None, description="True to include the blocks of each page with their positions."
    )
    confidence_scores_granularity: Literal["page", "block", "word"] | None = None
    extract_header: bool | None = Field(
        None, description="True to return page headers separately from the markdown."
    )
    extract_footer: bool | None = Field(
        None, description="True to return page footers separately from the markdown."
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
                raise ValueError("must be page numbers starting at 0, or ranges, such as 0-3,5")
        return value

    @property
    def wanted_pages(self) -> str | None:
        """The pages, in the format that custom classes use.

        There is exactly one way to write each set of pages.

        None means all pages.
        """
        if not self.pages:
            return None
        return _ranges_of(self.pages)

    def number_of(self, position: int) -> int:
        """Returns a page's number, given its position among the requested pages."""
        for part in (self.wanted_pages or "").split(",") if self.pages else ():
            first, _, last = part.partition("-")
            count = int(last or first) - int(first) + 1
            if position < count:
                return int(first) + position
            position -= count
        return position

    @property
    def url(self) -> str:
        """The document's URL. Files uploaded to this API are under `/v1/files/`."""
        match self.document:
            case DocumentUrl():
                return self.document.document_url
            case ImageUrl():
                address = self.document.image_url
                return address if isinstance(address, str) else address.url
            case UploadedDocument():
                return f"/v1/files/{self.document.file_id}"


def _ranges_of(pages: Sequence[int] | str) -> str:
    """Returns page numbers and ranges in order, listing each page once: `0-3,5`."""
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
    """The size at which a page was processed. Coordinates are in pixels relative to this size."""

    dpi: int
    height: int
    width: int


class _Place(msgspec.Struct, kw_only=True):
    top_left_x: int
    top_left_y: int
    bottom_right_x: int
    bottom_right_y: int


class OcrImage(_Place, kw_only=True):
    """An image on a page. The markdown refers to it by ID."""

    id: str
    image_base64: str | None = None
    image_annotation: None = None


class OcrWordScore(msgspec.Struct):
    """A word's confidence, from 0 to 1, and its start position in the markdown."""

    text: str
    confidence: float
    start_index: int


class OcrPageScores(msgspec.Struct, omit_defaults=True):
    """A page's confidence, based on its words."""

    average_page_confidence_score: float
    minimum_page_confidence_score: float
    word_confidence_scores: list[OcrWordScore] | None = None


class OcrBlockScores(msgspec.Struct):
    """A block's confidence, based on its words. Null if it has no words."""

    average_content_confidence_score: float | None = None
    minimum_content_confidence_score: float | None = None
    block_type_confidence_score: float | None = None


class OcrTable(msgspec.Struct):
    """A table stored outside the markdown, which refers to it by ID."""

    id: str
    content: str
    format: Literal["markdown", "html"]


class OcrBlock(_Place, kw_only=True, omit_defaults=True):
    """A block on a page, with its position."""

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


class PagesApart(msgspec.Struct):
    """The output from a flow that reads each page as a separate document."""

    pages: list[list[OcrPage]]
    """Each document's pages."""
    numbers: list[int]
    """Page numbers in the original document."""
    doc_size_bytes: int | None = None


class OcrUsage(msgspec.Struct):
    """Number of pages read."""

    pages_processed: int
    doc_size_bytes: int | None


class OcrReply(msgspec.Struct):
    """The result of reading a document."""

    pages: list[OcrPage]
    model: str
    usage_info: OcrUsage
    document_annotation: None = None


class OcrFieldError(msgspec.Struct):
    """An invalid field."""

    loc: list[str]
    msg: str
    type: str


class OcrErrorReply(msgspec.Struct, omit_defaults=True):
    """The body of every error response.

    Invalid fields also appear in `detail`, as Mistral's client expects.
    """

    message: str
    type: str
    param: str | None
    code: str
    detail: list[OcrFieldError] | None = None
