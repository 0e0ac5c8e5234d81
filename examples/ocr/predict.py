"""Reads documents: PDF, PNG, JPEG, TIFF and WebP. Returns Mistral's OCR API format.

Pages with a text layer are read from that layer; other pages are read by PP-OCR
(https://github.com/PaddlePaddle/PaddleOCR) on ONNX Runtime: RapidOCR for text, RapidLayout for
tables and images, RapidTable for cells. The unit of work is a page. No page depends on any other,
so a page has the same result on its own as it does in a longer document.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path as LocalPath
from typing import Any

import numpy as np
from assembly import (
    Box,
    Line,
    Region,
    Wishes,
    Word,
    blocks_of,
    boxed,
    in_order,
    is_inside,
    line_of,
    page_of,
    straightened,
)
from cog import BasePredictor, Input, Path
from document import Document, InvalidInput, Raster, chosen
from PIL import Image

MIN_TEXT_CHARS = 32
"""A text layer with fewer letters than this, beneath a full-page image, is considered a stamp on a
scan.
"""
SCAN_SHARE = 0.5
"""If an image covers this share of a page with hardly any text, the page counts as a scan."""
MAX_UNKNOWN_SHARE = 0.3
"""A text layer with a larger share of invalid letters is not used."""
MIN_DRAWN = 6
"""Minimum number of lines and areas for a page with a text layer to be searched for tables."""
MIN_IMAGE_PX = 16
MAX_IMAGES = 64
"""Maximum number of image files per prediction."""
MIN_REGION_SCORE = 0.5
TABLE_FORMATS = ["", "markdown", "html"]
GRANULARITIES = ["", "page", "block", "word"]


class Reader:
    """Reads images of pages.

    Args:
        threads: threads per network; 0 means one per core.
    """

    def __init__(self, threads: int) -> None:
        from rapid_layout import RapidLayout
        from rapid_table import RapidTable
        from rapidocr import RapidOCR

        options = {"intra_op_num_threads": threads or -1}
        self._ocr: Any = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.max_side_len": 3000,
                # The classifier rotated one in eight lines of an upright scan by 180 degrees, which
                # ruins those lines.
                "Global.use_cls": False,
                "EngineConfig.onnxruntime.intra_op_num_threads": threads or -1,
            }
        )
        self._layout: Any = RapidLayout(engine_cfg=options, conf_thresh=MIN_REGION_SCORE)
        self._table: Any = RapidTable()

    def lines(self, pixels: Any) -> list[tuple[Box, Line]]:
        """Returns an image's lines with straightened boxes.

        `pixels` has the dimensions [height, width, blue-green-red].
        """
        read = self._ocr(pixels, return_word_box=True)
        if not read.txts:
            return []
        level = straightened(read.boxes.tolist())
        return [
            (box, line_of(_words(text, pieces), float(box[3] - box[1]), " ".join(text.split())))
            for box, text, pieces in zip(level, read.txts, read.word_results, strict=True)
            if text.strip() and pieces
        ]

    def regions(self, pixels: Any, lines: Sequence[Line], kinds: Sequence[str]) -> list[Region]:
        """Returns a page's tables and images, with the tables' cells."""
        seen = self._layout(pixels)
        names = {"table": "table", "figure": "image"}
        regions = []
        for box, name, score in zip(seen.boxes, seen.class_names, seen.scores, strict=True):
            kind = names.get(name, "")
            if kind in kinds and score >= MIN_REGION_SCORE:
                left, top = (max(0, int(at)) for at in box[:2])
                place = (left, top, int(box[2]), int(box[3]))
                inside = [line for line in lines if is_inside(line.box, place)]
                if kind == "image":
                    regions.append(Region(kind, place))
                elif inside:
                    words = tuple(word for line in inside for word in line.words)
                    regions.append(Region(kind, place, self._cells(pixels, place, inside), words))
        return regions

    def _cells(self, pixels: Any, box: Box, lines: Sequence[Line]) -> str:
        """Returns the HTML for a table with these lines."""
        left, top, right, bottom = box
        texts = [
            [[[x - left, y - top] for x, y in _corners(part.box)], part.text, 1.0]
            for line in lines
            for part in _cells_in(line)
        ]
        html, *_ = self._table(pixels[top:bottom, left:right], texts)
        return re.sub(r"^.*?(<table>.*</table>).*$", r"\1", html, flags=re.DOTALL)


def _corners(box: Box) -> list[tuple[int, int]]:
    left, top, right, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _cells_in(line: Line) -> Iterator[Line]:
    """Yields the parts of a line separated by wide gaps."""
    part: list[Word] = []
    for word in line.words:
        if part and word.box[0] - part[-1].box[2] > line.size:
            yield line_of(part)
            part = []
        part.append(word)
    if part:
        yield line_of(part)


def _words(text: str, read: Sequence[Any]) -> list[Word]:
    """Returns the words of a line.

    The network returns fragments, several of which may form one word.

    Args:
        read: text, confidence and corners of each fragment, in order.
    """
    pieces = [(piece.strip(), float(score), _around(quad)) for piece, score, quad in read]
    words, at = [], 0
    for word in text.split():
        begin, size = at, 0
        while at < len(pieces) and size < len(word):
            size += len(pieces[at][0])
            at += 1
        own = pieces[begin:at] or pieces[-1:]  # one fragment may contain two words
        box = boxed([place for *_, place in own])
        words.append(Word(word, box, min(score for _, score, _ in own)))
    return words


def _around(quad: Sequence[Sequence[float]]) -> Box:
    xs, ys = [int(x) for x, _ in quad], [int(y) for _, y in quad]
    return min(xs), min(ys), max(xs), max(ys)


def layer_lines(facts: dict[str, Any]) -> list[Line]:
    """Returns the lines of a text layer, or None if it has no usable text."""
    lines = [
        line_of(
            [Word(text, (left, top, right, bottom)) for text, left, top, right, bottom in words],
            line_facts["size"],
            is_open=line_facts["is_open"],
        )
        for line_facts in facts["lines"]
        if (words := line_facts["words"])
    ]
    letters = "".join(line.text for line in lines).replace(" ", "")
    unknown = sum(char == "\ufffd" or "\ue000" <= char <= "\uf8ff" for char in letters)
    if unknown > MAX_UNKNOWN_SHARE * len(letters):
        return []
    is_scan = any(_covers(box, facts) for box in facts["images"])
    return [] if is_scan and len(letters) < MIN_TEXT_CHARS else lines


def _covers(box: Sequence[int], facts: dict[str, Any]) -> bool:
    area = (box[2] - box[0]) * (box[3] - box[1])
    return bool(area >= SCAN_SHARE * facts["width"] * facts["height"])


class Predictor(BasePredictor):
    """Reads documents."""

    def setup(self) -> None:
        self.reader = Reader(int(os.environ.get("OMP_NUM_THREADS", "0")))

    def work(self, input: Any) -> int:
        """Returns the number of pages to read."""
        with Document(input.document) as document:
            return len(chosen(input.pages, document.pages))

    def predict(
        self,
        document: Path = Input(description="PDF, PNG, JPEG, TIFF or WebP."),
        pages: str = Input(
            description="Page numbers, counted from 0, such as `0,2-4`. Empty: all.", default=""
        ),
        table_format: str = Input(
            description="Format of tables outside the markdown. Empty: tables are in the markdown.",
            default="",
            choices=TABLE_FORMATS,
        ),
        include_image_base64: bool = Input(
            description="True to return images as JPEG files.", default=False
        ),
        image_limit: int = Input(
            description="Maximum number of images on all pages together.", default=10_000, ge=0
        ),
        image_min_size: int = Input(
            description="Minimum width and height of an image, in pixels.",
            default=MIN_IMAGE_PX,
            ge=1,
        ),
        include_blocks: bool = Input(
            description="True to return the parts of each page with their positions.", default=False
        ),
        confidence_scores_granularity: str = Input(
            description=(
                "Level at which to return confidence scores. A text layer has full confidence."
            ),
            default="",
            choices=GRANULARITIES,
        ),
        extract_header: bool = Input(
            description="True to return headers separately from the markdown.", default=False
        ),
        extract_footer: bool = Input(
            description="True to return footers separately from the markdown.", default=False
        ),
    ) -> Iterator[dict[str, Any]]:
        """Yields each page in Mistral's format as soon as it has been read.

        Coordinates are in pixels, relative to the page's `dimensions`. Images are files rather than
        `image_base64`.
        """
        wishes = Wishes(
            table_format,
            include_blocks,
            confidence_scores_granularity,
            extract_header,
            extract_footer,
        )
        image_count = 0
        self.record_metric("doc_size_bytes", LocalPath(document).stat().st_size)
        with Document(LocalPath(document)) as opened:
            for index in chosen(pages, opened.pages):
                reader = PageReader(
                    opened, index, self.reader, image_limit - image_count, image_min_size
                )
                page = reader.page(wishes)
                image_count += len(page["images"])
                if include_image_base64:
                    _check_images(image_count)
                    reader.add_files(page["images"])
                yield page


def _check_images(count: int) -> None:
    if count > MAX_IMAGES:
        reason = (
            f"more than {MAX_IMAGES} images in one response; request fewer images or fewer pages"
        )
        raise InvalidInput("image_limit", reason)


class PageReader:
    """Reads one page.

    Args:
        min_px: minimum width and height of an image.
    """

    def __init__(
        self, document: Document, index: int, reader: Reader, max_images: int, min_px: int
    ) -> None:
        self._document = document
        self._index = index
        self._reader = reader
        self._max_images, self._min_px = max_images, min_px
        self._raster: Raster | None = None

    def page(self, wishes: Wishes) -> dict[str, Any]:
        """Returns the page in Mistral's format, without the bytes of its images."""
        facts = self._document.text(self._index)
        lines = layer_lines(facts)
        if lines:
            regions = self._images(facts)
            if facts["drawn"] >= MIN_DRAWN:
                regions += self._reader.regions(self._pixels, lines, ["table"])
        else:
            lines, regions = self._seen(facts)
        wanted = self._kept(regions)
        size = {name: facts[name] for name in ("dpi", "height", "width")}
        blocks = blocks_of(lines, wanted, size["height"])
        page: dict[str, Any] = page_of(self._index, size, blocks, facts["links"], wishes)
        return page

    def _seen(self, facts: dict[str, Any]) -> tuple[list[Line], list[Region]]:
        """Returns the lines in order, plus the tables and images, read from the rendered page."""
        seen = self._reader.lines(self._pixels)
        lines = [line for _, line in seen]
        regions = self._reader.regions(self._pixels, lines, ["table", "image"])
        tables = [region.box for region in regions if region.kind == "table"]
        outside = [line for line in seen if not any(is_inside(line[1].box, box) for box in tables)]
        regions = [
            region for region in regions if region.kind == "table" or not _covers(region.box, facts)
        ]
        return in_order(outside) if outside else [], regions

    @property
    def _pixels(self) -> Any:
        """Returns the page as (height, width, 3), in blue-green-red order."""
        return np.ascontiguousarray(self._rendered()[:, :, ::-1])

    def _rendered(self) -> Any:
        if self._raster is None:
            self._raster = self._document.raster(self._index)
        shape = (self._raster.height, self._raster.width, 3)
        return np.frombuffer(self._raster.pixels, np.uint8).reshape(shape)

    def _images(self, facts: dict[str, Any]) -> list[Region]:
        boxes = dict.fromkeys(tuple(box) for box in facts["images"] if not _covers(box, facts))
        return [Region("image", box) for box in boxes]

    def _kept(self, regions: Sequence[Region]) -> list[Region]:
        images = [
            region
            for region in regions
            if region.kind == "image"
            and min(region.box[2] - region.box[0], region.box[3] - region.box[1]) >= self._min_px
        ]
        return [region for region in regions if region.kind != "image"] + images[: self._max_images]

    def add_files(self, images: Sequence[dict[str, Any]]) -> None:
        """Adds the image files to their entries."""
        for image in images:
            left, top, right, bottom = (image[name] for name in CORNERS)
            path = LocalPath.cwd() / image["id"]
            Image.fromarray(self._rendered()).crop((left, top, right, bottom)).save(
                path, "JPEG", quality=90
            )
            image["image_base64"] = Path(path)


CORNERS = ("top_left_x", "top_left_y", "bottom_right_x", "bottom_right_y")
