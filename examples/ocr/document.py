"""Opens documents in a separate process, because a malicious document may crash its reader.

PDFium (https://pdfium.googlesource.com/pdfium) reads PDF, and Pillow reads images. Both are written
in C and C++, and documents are untrusted. Each document is therefore opened in a separate process.
The process has limited memory and time, holds no model, and exits when its document is closed. If
it dies, the error is reported for the page being read.

Coordinates are in pixels of the rendered page, from its upper left corner.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

POINTS_PER_INCH = 72
DPI = 150
"""Resolution at which PP-OCR reads ordinary print. A higher resolution is slower but no better."""
MAX_SIDE_PX = 3000
"""Maximum side length of a rendered page. Larger pages are rendered at a lower resolution."""
MAX_IMAGE_PX = 100_000_000
"""Maximum number of pixels in an image, even inside a page: A3 at 600 dpi has 70 million."""
MAX_PAGES = 10_000
MAX_DIVIDED = 512
"""Maximum number of pages in a divided document: a prediction can return that many files."""
MAX_OBJECTS = 200_000
"""Maximum number of text, line and image objects on a page."""
MEMORY_BYTES = 2 * 1024**3
OPENING_LIMIT_S, PAGE_CPU_S, PAGE_LIMIT_S = 4.0, 20, 120.0
"""Limits on counting the pages, and on CPU time and total time per page."""
MAX_HEAD_BYTES = 1024 * 1024
"""Maximum size of a page's text with word positions, about 30,000 words.

The output produced from that much text fits in a prediction.
"""
PDF_MARK = b"%PDF-"
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
HYPHENS = (2, 0xFFFE)
"""Characters that PDFium uses to mark a hyphen at the end of a line if the word continues on the
next line.
"""
IMAGE_OBJECT, PATH_OBJECT = 3, 2
"""FPDF_PAGEOBJ_IMAGE and FPDF_PAGEOBJ_PATH."""
PAGES = re.compile(r"\s*\d{1,5}\s*(-\s*\d{1,5}\s*)?(,\s*\d{1,5}\s*(-\s*\d{1,5}\s*)?)*")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
CLOCK_POLICY = 0
"""FPDF_POLICY_MACHINETIME_ACCESS, which determines whether new files contain their creation time.
"""
FILE_ID = re.compile(rb"/ID\s*\[\s*<[0-9A-Fa-f]*>\s*<[0-9A-Fa-f]*>\s*\]")
PASSWORD_ERROR = 4
"""FPDF_ERR_PASSWORD."""


class InvalidInput(ValueError):
    """An invalid input."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def chosen(pages: str, count: int) -> list[int]:
    """Returns the requested pages of a document, in order and without duplicates.

    Args:
        pages: numbers and ranges such as "0,2-4", from 0. If empty, all pages.

    Raises:
        InvalidInput: a page does not exist, or the format is invalid.
    """
    if not pages:
        return list(range(count))
    if not PAGES.fullmatch(pages):
        raise InvalidInput(
            "pages", "must be page numbers and ranges, counted from 0, such as 0,2-4"
        )
    is_chosen = bytearray(count)  # one byte per page, because there may be 100,000 ranges
    for part in pages.split(","):
        begin, _, end = part.partition("-")
        first, last = int(begin), int(end or begin)
        if last < first:
            raise InvalidInput("pages", f"{part.strip()} is a range that ends before it begins")
        if last >= count:
            raise InvalidInput(
                "pages", f"page {last} does not exist; there are {count} pages, counted from 0"
            )
        is_chosen[first : last + 1] = b"\1" * (last + 1 - first)
    return [number for number, is_asked in enumerate(is_chosen) if is_asked]


class Unreadable(Exception):
    """The error that the process reports for a document or one of its pages."""


class Raster(NamedTuple):
    """A rendered page: rows of red, green and blue bytes."""

    width: int
    height: int
    pixels: bytes


class Document:
    """A document whose pages are read one at a time.

    Raises:
        InvalidInput: the document can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self.pages = int(self._ask({"ask": "pages"}, "", OPENING_LIMIT_S)[0]["pages"])
        except BaseException:
            self.close()
            raise

    def text(self, page: int) -> dict[str, Any]:
        """Returns a page's size, its text layer, and the boxes of its images.

        Raises:
            InvalidInput: the page can't be read.
        """
        request = {"ask": "text", "page": page}
        facts: dict[str, Any] = self._ask(request, f"page {page}: ", PAGE_LIMIT_S)[0]
        return facts

    def raster(self, page: int) -> Raster:
        """Renders a page.

        Raises:
            InvalidInput: the page can't be rendered.
        """
        request = {"ask": "raster", "page": page}
        head, pixels = self._ask(request, f"page {page}: ", PAGE_LIMIT_S)
        return Raster(head["width"], head["height"], pixels)

    def alone(self, page: int) -> tuple[str, bytes]:
        """Returns the file suffix and bytes of a document that contains only this page.

        PDF pages become PDFs, TIFF pages become PNGs, and other images are unchanged.

        Raises:
            InvalidInput: the page can't be read.
        """
        head, data = self._ask({"ask": "alone", "page": page}, f"page {page}: ", PAGE_LIMIT_S)
        return head["suffix"], data

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Document:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, asked: dict[str, Any], where: str, limit_s: float) -> tuple[Any, bytes]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        until_s = time.monotonic() + limit_s
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            read = _reader_until(self._process.stdout, until_s)
            head_bytes, body_bytes = (int.from_bytes(read(8), "little") for _ in range(2))
            head = json.loads(read(head_bytes))
            body = read(body_bytes)
        except TimeoutError:
            reason = f"not read within {limit_s:g} s"
            raise InvalidInput("document", where + reason) from None
        except (EOFError, BrokenPipeError):
            reason = (
                f"reading it requires more than {MEMORY_BYTES // 1024**2} MiB or {PAGE_CPU_S} s"
            )
            status = self._process.wait()
            if status not in (-9, -24, -6, 1):  # killed, out of CPU time, or out of memory
                reason = "it is damaged"
            raise InvalidInput("document", where + reason) from None
        if "wrong" in head:
            raise InvalidInput("document", where + head["wrong"])
        return head, body


def divided(path: Path, folder: Path, pages: str) -> Iterator[tuple[int, Path]]:
    """Divides a document into documents of one page each. Yields each page number and file.

    Args:
        pages: requested pages, in the format of `chosen`.

    Raises:
        InvalidInput: the document can't be read or does not have these pages, or too many are
        requested.
    """
    with Document(path) as document:
        numbers = chosen(pages, document.pages)
        if len(numbers) > MAX_DIVIDED:
            reason = f"{len(numbers)} pages were requested, but the maximum is {MAX_DIVIDED}"
            raise InvalidInput("pages", f"{reason}; request a range, such as 0-{MAX_DIVIDED - 1}")
        for number in numbers:
            suffix, data = document.alone(number)
            page = folder / f"{number}{suffix}"
            page.write_bytes(data)
            yield number, page


def _reader_until(stream: IO[bytes], until_s: float) -> Callable[[int], bytes]:
    def read(size: int) -> bytes:
        parts = []
        while size:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
                raise TimeoutError
            part = os.read(stream.fileno(), size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    return read


def main(path: Path) -> None:
    """Responds to requests for the document until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    opened: PdfPages | ImagePages | None = None
    for line in sys.stdin.buffer:
        request, body = json.loads(line), b""
        _bound_cpu_time()
        try:
            if opened is None:
                opened = _opened(path)
            head: dict[str, Any] = {"pages": len(opened)}
            if request["ask"] == "text":
                head = opened.text(request["page"])
            elif request["ask"] == "raster":
                raster = opened.raster(request["page"])
                head, body = {"width": raster.width, "height": raster.height}, raster.pixels
            elif request["ask"] == "alone":
                head["suffix"], body = opened.alone(request["page"])
        except Unreadable as error:
            head = {"wrong": str(error)}
        except MemoryError:
            head = {"wrong": f"reading it requires more than {MEMORY_BYTES // 1024**2} MiB"}
        encoded = json.dumps(head).encode()
        if len(encoded) > MAX_HEAD_BYTES:
            wrong = "it has too much text (more than about 30,000 words); split it"
            encoded = json.dumps({"wrong": wrong}).encode()
        sizes = len(encoded).to_bytes(8, "little") + len(body).to_bytes(8, "little")
        sys.stdout.buffer.write(sizes + encoded + body)
        sys.stdout.buffer.flush()


def _bound_cpu_time() -> None:
    used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limit_s = int(used_s) + PAGE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _opened(path: Path) -> PdfPages | ImagePages:
    with path.open("rb") as file:
        is_pdf = PDF_MARK in file.read(1024)
    return PdfPages(path) if is_pdf else ImagePages(path)


class PdfPages:
    """The pages of a PDF.

    Raises:
        Unreadable: the file is encrypted or damaged, or has too many pages.
    """

    def __init__(self, path: Path) -> None:
        import pypdfium2

        self._pdfium: Any = pypdfium2
        self._raw: Any = pypdfium2.raw
        with self._readable("it is damaged: not a readable PDF"):
            self._file = pypdfium2.PdfDocument(path)
            self._count = len(self._file)
        if not self._count:
            raise Unreadable("it has no pages")
        if self._count > MAX_PAGES:
            raise Unreadable(f"it has {self._count} pages, but the maximum is {MAX_PAGES}")

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def _readable(self, otherwise: str) -> Iterator[None]:
        try:
            yield
        except self._pdfium.PdfiumError as error:
            if getattr(error, "err_code", 0) == PASSWORD_ERROR:
                raise Unreadable("it is encrypted; remove the password and try again") from error
            raise Unreadable(otherwise) from error

    def text(self, number: int) -> dict[str, Any]:
        """Returns lines of words with boxes, boxes of images, links, and the number of objects."""
        with self._readable("it is damaged"):
            page = self._file[number]
            width, height, dpi = _find_rendered_size(*page.get_size())
            place = self._placer(page, width, height)
            images, drawn = self._objects(page, place)
            text = page.get_textpage()
            return {
                "width": width,
                "height": height,
                "dpi": dpi,
                "lines": list(self._lines(text.raw, place)),
                "images": images,
                "drawn": drawn,
                "links": self._links(text.raw),
            }

    def raster(self, number: int) -> Raster:
        """Returns the page rendered by PDFium."""
        with self._readable("it is damaged"):
            page = self._file[number]
            width, height, _ = _find_rendered_size(*page.get_size())
            self._check_images(page)
            bitmap = self._pdfium.PdfBitmap.new_native(width, height, self._raw.FPDFBitmap_BGRx)
            bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
            self._raw.FPDF_RenderPageBitmap(
                bitmap, page, 0, 0, width, height, 0, self._raw.FPDF_ANNOT
            )
            return Raster(width, height, bitmap.to_pil().convert("RGB").tobytes())

    def alone(self, number: int) -> tuple[str, bytes]:
        """Returns a PDF with only this page, and the file suffix."""
        # PDFium writes the current time and a random file identifier.
        self._raw.FPDF_SetSandBoxPolicy(CLOCK_POLICY, 0)
        with self._readable("it is damaged"):
            copy, written = self._pdfium.PdfDocument.new(), io.BytesIO()
            copy.import_pages(self._file, [number])
            copy.save(written)
            copy.close()
        return ".pdf", FILE_ID.sub(b"/ID[<00><00>]", written.getvalue())

    def _placer(self, page: Any, width: int, height: int) -> Callable[..., list[int]]:
        """Returns a function that converts a box on the page, which may be rotated, to pixels."""
        x, y = ctypes.c_int(), ctypes.c_int()

        def corner(at_x: float, at_y: float) -> tuple[int, int]:
            self._raw.FPDF_PageToDevice(
                page, 0, 0, width, height, 0, at_x, at_y, ctypes.byref(x), ctypes.byref(y)
            )
            return min(max(x.value, 0), width), min(max(y.value, 0), height)

        def place(left: float, bottom: float, right: float, top: float) -> list[int]:
            (x0, y0), (x1, y1) = corner(left, top), corner(right, bottom)
            return [min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)]

        return place

    def _objects(self, page: Any, place: Callable[..., list[int]]) -> tuple[list[list[int]], int]:
        """Returns the image boxes and the number of lines and areas."""
        images, drawn = [], 0
        for count, shape in enumerate(page.get_objects(max_depth=1)):
            if count >= MAX_OBJECTS:
                raise Unreadable(f"it has more than {MAX_OBJECTS} objects")
            if shape.type == IMAGE_OBJECT:
                images.append(place(*shape.get_bounds()))
            drawn += shape.type == PATH_OBJECT
        return images, drawn

    def _check_images(self, page: Any) -> None:
        for count, image in enumerate(page.get_objects(filter=[IMAGE_OBJECT])):
            if count >= MAX_OBJECTS:
                raise Unreadable(f"it has more than {MAX_OBJECTS} images")
            _check_size(*image.get_px_size())

    def _lines(self, text: Any, place: Callable[..., list[int]]) -> Iterator[dict[str, Any]]:
        """Yields the lines in the file's order, which is usually the reading order."""
        line = _Line()
        for number in range(self._raw.FPDFText_CountChars(text)):
            code = self._raw.FPDFText_GetUnicode(text, number)
            if code in (10, 13):
                if line.words:
                    yield line.shown(place)
                line = _Line()
            elif code in HYPHENS:
                line.is_open = True
                if line.words:
                    yield line.shown(place)
                line = _Line()
            elif code <= 32 or code == 0xA0:
                line.end_word()
            else:
                line.add(chr(code), *self._box(text, number))
        if line.words:
            yield line.shown(place)

    def _box(self, text: Any, number: int) -> tuple[tuple[float, float, float, float], float]:
        rect = self._raw.FS_RECTF()
        self._raw.FPDFText_GetLooseCharBox(text, number, rect)
        size = self._raw.FPDFText_GetFontSize(text, number)
        return (rect.left, rect.bottom, rect.right, rect.top), size

    def _links(self, text: Any) -> list[str]:
        """Returns the links on the page."""
        links = self._raw.FPDFLink_LoadWebLinks(text)
        try:
            urls = []
            for number in range(min(self._raw.FPDFLink_CountWebLinks(links), 1000)):
                size = min(self._raw.FPDFLink_GetURL(links, number, None, 0), 2048)
                buffer = (ctypes.c_ushort * size)()
                self._raw.FPDFLink_GetURL(links, number, buffer, size)
                urls.append(bytes(buffer).decode("utf-16-le", "replace").rstrip("\0"))
            return list(dict.fromkeys(urls))
        finally:
            self._raw.FPDFLink_CloseWebLinks(links)


class _Line:
    """A line of text that is being read."""

    GAP = 1.0
    """Gap between two table cells, as a multiple of the letter size."""

    def __init__(self) -> None:
        self.words: list[tuple[str, list[float]]] = []
        self.is_open = False
        self._begins = True
        self._sizes: list[float] = []

    def add(self, char: str, box: tuple[float, float, float, float], size: float) -> None:
        self._sizes.append(box[3] - box[1])
        if not self._begins:
            text, (left, bottom, right, top) = self.words[-1]
            if abs(box[0] - right) <= self.GAP * max(size, box[3] - box[1]):
                both = [min(left, box[0]), min(bottom, box[1]), max(right, box[2])]
                self.words[-1] = (text + char, [*both, max(top, box[3])])
                return
        self.words.append((char, list(box)))
        self._begins = False

    def end_word(self) -> None:
        self._begins = True

    def shown(self, place: Callable[..., list[int]]) -> dict[str, Any]:
        words = [[_plain(text), *place(*box)] for text, box in self.words]
        size = sorted(self._sizes)[len(self._sizes) // 2]
        return {"words": words, "size": size * DPI / POINTS_PER_INCH, "is_open": self.is_open}


def _plain(text: str) -> str:
    """Removes unpaired surrogates, which are not valid text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _find_rendered_size(width: float, height: float) -> tuple[int, int, int]:
    """Returns a page's width and height (both in pixels) and dpi, given its size in points."""
    if not (width > 0 and height > 0):
        raise Unreadable("its width or height is zero")
    scale = min(DPI / POINTS_PER_INCH, MAX_SIDE_PX / max(width, height))
    dpi = max(1, round(scale * POINTS_PER_INCH))
    return max(1, round(width * scale)), max(1, round(height * scale)), dpi


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_IMAGE_PX:
        raise Unreadable(
            f"an image of {width}x{height} pixels; at most {MAX_IMAGE_PX} pixels are allowed"
        )


class ImagePages:
    """The pages of an image file: one, or several in a TIFF.

    Raises:
        Unreadable: the file is not a supported image, or has too many pages.
    """

    def __init__(self, path: Path) -> None:
        from PIL import Image, ImageOps

        self._path = path
        Image.MAX_IMAGE_PIXELS = None  # `_check_size` limits the size
        self._upright: Any = ImageOps.exif_transpose
        try:
            self._file = Image.open(path, formats=FORMATS)
            self._count = self._counted()
        except Unreadable:
            raise
        except Exception as error:  # decoders raise many kinds of errors for damaged files
            raise Unreadable("not a readable PDF, PNG, JPEG, TIFF or WebP") from error

    def _counted(self) -> int:
        if self._file.format != "TIFF":
            return 1  # not an animation's frames
        count = 0
        try:
            while True:
                self._file.seek(count)
                count += 1
                if count > MAX_PAGES:
                    raise Unreadable(f"it has more than {MAX_PAGES} pages")
        except EOFError:
            return count

    def __len__(self) -> int:
        return self._count

    def text(self, number: int) -> dict[str, Any]:
        """Returns the image's size. There is no text layer."""
        image, dpi = self._upright_image(number)
        width, height, scale = self._size(image)
        sizes = {"width": width, "height": height, "dpi": max(1, round(dpi * scale))}
        return sizes | {"lines": [], "images": [], "drawn": 0, "links": []}

    def raster(self, number: int) -> Raster:
        """Returns the image, at most MAX_SIDE_PX wide and high."""
        from PIL import Image

        image, _ = self._upright_image(number)
        width, height, _ = self._size(image)
        on_white = Image.new("RGB", (width, height), "white")
        resized = image.convert("RGBA").resize((width, height), Image.Resampling.LANCZOS)
        on_white.paste(resized, mask=resized.getchannel("A"))
        return Raster(width, height, on_white.tobytes())

    def alone(self, number: int) -> tuple[str, bytes]:
        """Returns a TIFF page as a PNG, or any other file unchanged, and the file suffix."""
        image, dpi = self._upright_image(number)
        kind = str(self._file.format)
        if kind != "TIFF":
            return f".{kind.lower()}", self._path.read_bytes()
        written = io.BytesIO()
        plain = image if image.mode in PNG_MODES else image.convert("RGB")
        plain.save(written, "PNG", dpi=(dpi, dpi))
        return ".png", written.getvalue()

    def _upright_image(self, number: int) -> tuple[Any, float]:
        try:
            self._file.seek(number)
            _check_size(*self._file.size)
            dpi = float(self._file.info.get("dpi", (DPI, DPI))[0])
            return self._upright(self._file), dpi if 1 <= dpi <= 10_000 else DPI
        except (Unreadable, MemoryError):
            raise
        except Exception as error:
            raise Unreadable("it is damaged") from error

    @staticmethod
    def _size(image: Any) -> tuple[int, int, float]:
        scale = min(1.0, MAX_SIDE_PX / max(image.size))
        width, height = (max(1, round(side * scale)) for side in image.size)
        return width, height, scale


if __name__ == "__main__":
    main(Path(sys.argv[1]))
