"""Turns the text read from a page into Mistral's format: markdown, blocks, tables and images.

Lines come from a text layer, in the layer's order, or from an image. Lines from an image are put in
order by repeatedly cutting the page at its widest gap (recursive XY cut, Nagy and Seth 1984).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from statistics import fmean, median
from typing import Any

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels."""
TITLE_SIZES = ((1.7, "# "), (1.2, "## "))
"""Minimum letter size of a title relative to the usual size, and the title's markdown prefix."""
MAX_TITLE_LINES = 3
MAX_LEADING = 0.9
"""Maximum gap between two lines of a paragraph, in line heights."""
MARGIN = 0.08
"""Share of a page's height, at the top and bottom, reserved for headers and footers."""
MIN_COLUMN_LINES, MIN_COLUMN_WIDTH = 3, 0.2
"""Minimum number of lines in a column, and its minimum width relative to the area being cut."""
BULLET = re.compile(r"(?:[•‣◦▪●·–—*-]|\(?(?:\d{1,3}|[a-zA-Z])[.)])\s+(?=\S)")
"""Start of a list item."""
BULLET_SIGN = re.compile(r"[•‣◦▪●·–—*-]\s+")
HYPHEN = re.compile(r"(?<=\w)[-\u2010\u00ad]$")


@dataclass(frozen=True)
class Word:
    """A word and its confidence, from 0 to 1."""

    text: str
    box: Box
    confidence: float = 1.0


@dataclass(frozen=True)
class Line:
    """A line of text and its words. `size` is the height of its letters.

    `is_open` is True if the line ended mid-word with a hyphen.
    """

    words: tuple[Word, ...]
    box: Box
    size: float
    text: str
    is_open: bool = False


@dataclass(frozen=True)
class Region:
    """A non-text part of a page: a table with its HTML code, or an image."""

    kind: str
    box: Box
    html: str = ""
    words: tuple[Word, ...] = ()


@dataclass
class Block:
    """A part of a page, in markdown."""

    kind: str
    box: Box
    content: str
    words: list[Word] = field(default_factory=list)
    region: Region | None = None
    mark: str = ""
    """Markdown that precedes its content on the page."""
    id: str = ""
    """ID of an image, or of a table that is kept separate from the markdown."""


def boxed(boxes: Sequence[Box]) -> Box:
    """Returns the bounding box of all `boxes`."""
    return (
        min(box[0] for box in boxes),
        min(box[1] for box in boxes),
        max(box[2] for box in boxes),
        max(box[3] for box in boxes),
    )


def line_of(
    words: Sequence[Word], size: float | None = None, text: str = "", *, is_open: bool = False
) -> Line:
    """Joins words into a line, from left to right. `text` is the words separated by spaces."""
    box = boxed([word.box for word in words])
    line_text = text or " ".join(word.text for word in words)
    return Line(tuple(words), box, size or float(box[3] - box[1]), line_text, is_open)


def is_inside(box: Box, region: Box) -> bool:
    """Returns whether the center of a box is in a region."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return region[0] <= x <= region[2] and region[1] <= y <= region[3]


def straightened(quads: Sequence[Sequence[Sequence[float]]]) -> list[Box]:
    """Returns bounding boxes of quadrilaterals after straightening tilted lines.

    The page is rotated back by the median angle of its lines, weighted by their widths.
    """
    angles = sorted((math.atan2(b[1] - a[1], b[0] - a[0]), math.dist(a, b)) for a, b, *_ in quads)
    half, so_far, angle = sum(width for _, width in angles) / 2, 0.0, 0.0
    for line_angle, width in angles:
        so_far += width
        if so_far >= half:
            angle = line_angle
            break
    cos, sin = math.cos(-angle), math.sin(-angle)
    boxes = []
    for quad in quads:
        turned = [(x * cos - y * sin, x * sin + y * cos) for x, y in quad]
        # The midpoints of the sides are used, because the corners of a tilted box stick out.
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = turned
        box = (min(x0, x3), (y0 + y1) / 2, max(x1, x2), (y2 + y3) / 2)
        boxes.append((round(box[0]), round(box[1]), round(box[2]), round(box[3])))
    return boxes


def in_order(lines: Sequence[tuple[Box, Line]]) -> list[Line]:
    """Returns lines in reading order, joining the lines in each row.

    Expects straightened boxes.
    """
    return list(_order(list(lines)))


def _order(lines: list[tuple[Box, Line]]) -> Iterator[Line]:
    if len(lines) > 1:
        height = median(box[3] - box[1] for box, _ in lines)
        for axis, least in ((0, height), (1, height * 1.5)):
            parts = _cut(lines, axis, least)
            if len(parts) > 1 and (axis == 1 or _are_columns(parts)):
                for part in parts:
                    yield from _order(part)
                return
    yield from _rows(lines)


def _cut(lines: list[tuple[Box, Line]], axis: int, least: float) -> list[list[tuple[Box, Line]]]:
    """Returns the lines on each side of the widest gap, if it is wide enough.

    Axis 0: from left to right.
    """
    ordered = sorted(lines, key=lambda one: one[0][axis])
    end, widest, at = ordered[0][0][axis + 2], least, 0
    for number, (box, _) in enumerate(ordered):
        if box[axis] - end > widest:
            widest, at = box[axis] - end, number
        end = max(end, box[axis + 2])
    return [ordered[:at], ordered[at:]] if at else [ordered]


def _are_columns(parts: Sequence[list[tuple[Box, Line]]]) -> bool:
    """Returns whether adjacent parts are columns to read in sequence rather than cells in a row."""
    whole = boxed([box for part in parts for box, _ in part])
    width = whole[2] - whole[0]
    return all(
        len(part) >= MIN_COLUMN_LINES
        and median(box[2] - box[0] for box, _ in part) >= MIN_COLUMN_WIDTH * width
        for part in parts
    )


def _rows(lines: list[tuple[Box, Line]]) -> Iterator[Line]:
    rows: list[list[tuple[Box, Line]]] = []
    for box, line in sorted(lines, key=lambda one: one[0][1] + one[0][3]):
        middle, height = (box[1] + box[3]) / 2, box[3] - box[1]
        last = rows[-1][0][0] if rows else None
        if last and abs(middle - (last[1] + last[3]) / 2) < 0.5 * min(height, last[3] - last[1]):
            rows[-1].append((box, line))
        else:
            rows.append([(box, line)])
    for row in rows:
        row.sort(key=lambda one: one[0][0])
        words = [word for _, line in row for word in line.words]
        text = " ".join(line.text for _, line in row)
        yield line_of(words, max(box[3] - box[1] for box, _ in row), text)


def blocks_of(lines: Sequence[Line], regions: Sequence[Region], height: int) -> list[Block]:
    """Returns the blocks of a page.

    Args:
        lines: in reading order. Lines inside a table are skipped, because the table's region
            already contains their words.
    """
    tables = [region.box for region in regions if region.kind == "table"]
    outside = [line for line in lines if not any(is_inside(line.box, box) for box in tables)]
    usual = _usual_size(outside)
    blocks = [_text_block(group, usual, height) for group in _paragraphs(outside)]
    for region in sorted(regions, key=lambda one: one.box[1]):
        block = Block(region.kind, region.box, "", list(region.words), region)
        blocks.insert(_place_of(region, blocks), block)
    return blocks


def _place_of(region: Region, blocks: Sequence[Block]) -> int:
    """Returns the index of the first block to read after a region: the first one below its top."""
    for number, block in enumerate(blocks):
        overlaps = block.box[0] < region.box[2] and region.box[0] < block.box[2]
        if overlaps and block.box[1] >= region.box[1]:
            return number
    return len(blocks)


def _usual_size(lines: Sequence[Line]) -> float:
    """Returns the most common letter size."""
    sizes = sorted((line.size, len(line.text)) for line in lines)
    half, so_far = sum(count for _, count in sizes) / 2, 0
    for size, count in sizes:
        so_far += count
        if so_far >= half:
            return size
    return 1.0


def _paragraphs(lines: Sequence[Line]) -> Iterator[list[Line]]:
    group: list[Line] = []
    for line in lines:
        if group and not _goes_on(group, line):
            yield group
            group = []
        group.append(line)
    if group:
        yield group


def _goes_on(group: Sequence[Line], line: Line) -> bool:
    last = group[-1]
    gap = line.box[1] - last.box[3]
    is_same_size = abs(line.size - last.size) <= 0.2 * max(line.size, last.size)
    is_below = -0.6 * last.size < gap < MAX_LEADING * max(line.size, last.size)
    overlaps = line.box[0] < last.box[2] and last.box[0] < line.box[2]
    is_list = bool(BULLET.match(group[0].text))
    return is_same_size and is_below and overlaps and (is_list or not BULLET.match(line.text))


def _text_block(group: Sequence[Line], usual: float, height: int) -> Block:
    box = boxed([line.box for line in group])
    words = [word for line in group for word in line.words]
    if BULLET.match(group[0].text):
        content = "\n".join(_points(group))
        return Block("list", box, content, words)
    content = _joined(group)
    size = max(line.size for line in group)
    if len(group) <= MAX_TITLE_LINES and re.search(r"\w", content):
        for times, mark in TITLE_SIZES:
            if size >= times * usual:
                return Block("title", box, content.replace("\n", " "), words, mark=mark)
    at_top, at_bottom = box[3] < MARGIN * height, box[1] > (1 - MARGIN) * height
    kind = "header" if at_top else "footer" if at_bottom else "text"
    return Block(kind, box, content, words)


def _points(group: Sequence[Line]) -> Iterator[str]:
    point: list[Line] = []
    for line in group:
        if point and BULLET.match(line.text):
            yield BULLET_SIGN.sub("- ", _joined(point), count=1)
            point = []
        point.append(line)
    yield BULLET_SIGN.sub("- ", _joined(point), count=1)


def _joined(lines: Sequence[Line]) -> str:
    """Joins lines unchanged, except for words split between two lines.

    The hyphens in split words stay, because a word may also be hyphenated within a line.
    """
    text = ""
    for line in lines:
        text += f"{line.text}-" if line.is_open else line.text
        text += "" if HYPHEN.search(text) else "\n"
    return text.removesuffix("\n")


class _Rows(HTMLParser):
    """Reads the rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._span = 1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            spans = dict(attrs).get("colspan") or "1"
            self._span = min(int(spans), 100) if spans.isdigit() else 1
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.rows:
            self.rows[-1] += [""] * (self._span - 1)

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def markdown_table(html: str) -> str:
    """Returns a table in GitHub's markdown.

    A cell that spans several columns is followed by empty ones.
    """
    parser = _Rows()
    parser.feed(html)
    columns = max((len(row) for row in parser.rows), default=0)
    rows = [
        [cell.strip().replace("|", "\\|") for cell in row] + [""] * (columns - len(row))
        for row in parser.rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines[:1], f"|{' --- |' * columns}", *lines[1:]]) if lines else ""


@dataclass(frozen=True)
class Wishes:
    """The options requested for each page."""

    table_format: str = ""
    """If empty, tables stay in the markdown."""
    include_blocks: bool = False
    confidence_scores_granularity: str = ""
    extract_header: bool = False
    extract_footer: bool = False


def page_of(
    index: int,
    size: dict[str, int],
    blocks: Sequence[Block],
    links: Sequence[str],
    wishes: Wishes,
) -> dict[str, Any]:
    """Returns a page in Mistral's format, ready for JSON. The page's images have no bytes yet.

    Images and tables are numbered from 0 on each page, so identical pages produce identical results
    in all documents.

    Args:
        index: page number in its document, from 0.
        size: the page's dpi, height and width.
        links: links found on the page.
    """
    page: dict[str, Any] = {"index": index, "markdown": "", "images": [], "dimensions": size}
    tables: list[dict[str, Any]] = []
    aside: dict[str, list[str]] = {"header": [], "footer": []}
    pieces = []
    for block in blocks:
        content = _shown(block, wishes, page["images"], tables)
        if block.kind in aside and getattr(wishes, f"extract_{block.kind}"):
            aside[block.kind].append(content)
        else:
            pieces.append(content)
    page["markdown"] = "\n\n".join(pieces)
    page |= {"tables": tables} if wishes.table_format else {}
    page |= {"hyperlinks": list(links)} if links else {}
    for kind, texts in aside.items():
        if getattr(wishes, f"extract_{kind}"):
            page[kind] = "\n".join(texts) or None
    if wishes.include_blocks:
        page["blocks"] = [_block(block, wishes) for block in blocks]
    if wishes.confidence_scores_granularity:
        page["confidence_scores"] = _scores(page["markdown"], blocks, wishes)
    return page


def _shown(
    block: Block,
    wishes: Wishes,
    images: list[dict[str, Any]],
    tables: list[dict[str, Any]],
) -> str:
    """Returns a block as markdown for its page. Assigns ids to images and tables."""
    if block.kind == "image":
        block.id = f"img-{len(images)}.jpeg"
        images.append({"id": block.id, **_corners(block.box)})
        block.content = f"![{block.id}]({block.id})"
    elif block.region is not None:
        as_html = wishes.table_format == "html"
        block.content = block.region.html if as_html else markdown_table(block.region.html)
        if wishes.table_format:
            block.id = f"tbl-{len(tables)}.{'html' if as_html else 'md'}"
            tables.append({"id": block.id, "content": block.content, "format": wishes.table_format})
            return f"[{block.id}]({block.id})"
        return block.content
    return block.mark + block.content


def _corners(box: Box) -> dict[str, int]:
    names = ("top_left_x", "top_left_y", "bottom_right_x", "bottom_right_y")
    return dict(zip(names, box, strict=True))


def _block(block: Block, wishes: Wishes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": block.kind, **_corners(block.box), "content": block.content}
    if block.kind == "image":
        entry["image_id"] = block.id
    if block.kind == "table" and block.id:
        entry["table_id"] = block.id
    if wishes.confidence_scores_granularity == "block":
        sure = [word.confidence for word in block.words]
        entry["confidence_scores"] = {
            "average_content_confidence_score": _rounded(fmean(sure)) if sure else None,
            "minimum_content_confidence_score": _rounded(min(sure)) if sure else None,
        }
    return entry


def _scores(markdown: str, blocks: Sequence[Block], wishes: Wishes) -> dict[str, Any]:
    """Returns the confidence of a page's words. A page without words has full confidence."""
    words = [word for block in blocks for word in block.words]
    sure = [word.confidence for word in words] or [1.0]
    scores: dict[str, Any] = {
        "average_page_confidence_score": _rounded(fmean(sure)),
        "minimum_page_confidence_score": _rounded(min(sure)),
    }
    if wishes.confidence_scores_granularity == "word":
        scores["word_confidence_scores"] = list(_word_scores(markdown, words))
    return scores


def _word_scores(markdown: str, words: Sequence[Word]) -> Iterator[dict[str, Any]]:
    """Yields the words that appear unchanged in the markdown, with their positions."""
    at = 0
    for word in words:
        if (place := markdown.find(word.text, at)) >= 0:
            at = place + len(word.text)
            sure = _rounded(word.confidence)
            yield {"text": word.text, "confidence": sure, "start_index": place}


def _rounded(score: float) -> float:
    return round(score, 4)
