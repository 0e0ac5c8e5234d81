"""Documents for tests, generated here: reports with a text layer, scans of them, and hostile files.

PDFs are written by hand (ISO 32000-1), so that each may be broken in a different way.
"""

from __future__ import annotations

import io
import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH_PT, HEIGHT_PT, LEFT_PT, TOP_PT = 612, 792, 72, 720
TITLE_PT, TEXT_PT, LEADING_PT = 20, 11, 14
LINES, CHARS = 44, 84
"""Lines per page and characters per line."""
TABLE = (("Gate", "Height", "State"), ("North", "4.2 m", "open"), ("South", "3.9 m", "shut"))
ROOT = Path(__file__).parents[1]


def pdf_file(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """A PDF with these objects, the first of which is its catalog."""
    out, places = b"%PDF-1.7\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R%s>>\n"
    return out + end % (size, table, size, trailer) + b"startxref\n%d\n%%%%EOF" % len(out)


def stream(entries: bytes, data: bytes, *, is_packed: bool = True) -> bytes:
    if is_packed:
        entries, data = entries + b"/Filter/FlateDecode", zlib.compress(data, 9)
    return b"<<%s/Length %d>>stream\n%s\nendstream" % (entries, len(data), data)


def pages_pdf(
    contents: Sequence[bytes],
    things: Mapping[bytes, bytes] | None = None,
    *,
    is_shared: bool = True,
) -> bytes:
    """A PDF with a page for each content stream.

    Args:
        contents: one content stream per page, as PDF objects.
        things: objects that pages may draw, keyed by name.
        is_shared: True if every page may draw all of the objects. False if each page has one
            object, in order.
    """
    named = list((things or {}).items())
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"
    fixed = [b"", b"", font, *(thing for _, thing in named)]
    drawn = [b"/%s %d 0 R" % (name, at) for at, (name, _) in enumerate(named, 4)]
    kids = []
    for number, content in enumerate(contents):
        at = len(fixed) + 1
        kids.append(b"%d 0 R" % at)
        resources = b"<</Font<</F1 3 0 R>>/XObject<<%s>>>>"
        resources %= b"".join(drawn if is_shared else drawn[number : number + 1])
        box = b"[0 0 %d %d]" % (WIDTH_PT, HEIGHT_PT)
        fixed.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox%s/Resources%s/Contents %d 0 R>>"
            % (box, resources, at + 1)
        )
        fixed.append(content)
    fixed[0] = b"<</Type/Catalog/Pages 2 0 R>>"
    fixed[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(kids), b" ".join(kids))
    return pdf_file(fixed)


def shown(text: str, x: float, y: float, size: float) -> bytes:
    """The operators that draw a line of ASCII text."""
    escaped = re.sub(rb"([()\\])", rb"\\\1", text.encode("ascii"))
    return b"BT /F1 %g Tf 1 0 0 1 %g %g Tm (%s) Tj ET\n" % (size, x, y, escaped)


def own_lines() -> list[str]:
    """Lines of prose from this repository's documentation, without the markup."""
    lines = []
    for file in sorted((ROOT / "docs").rglob("*.md")):
        text = file.read_text(encoding="utf-8").encode("ascii", "ignore").decode()
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
        for paragraph in plain.split("\n\n"):
            words = re.sub(r"[*`#|<>_]+", "", paragraph).split()
            if len(words) > 12 and not paragraph.startswith(("|", "- ", "```")):
                lines += textwrap.wrap(" ".join(words), CHARS)
    return lines


def report_pages(count: int, *, first: int = 0) -> list[list[str]]:
    """The lines of `count` report pages: a title, then prose."""
    lines = own_lines()
    size = LINES - 4
    assert len(lines) >= (first + count) * size, "there is no more prose in docs/"
    return [
        [f"Chapter {number + 1}", *lines[number * size : (number + 1) * size]]
        for number in range(first, first + count)
    ]


def page_content(lines: Sequence[str], *, has_table: bool = False) -> bytes:
    """A page's content stream with a title, lines and optionally a table at the end."""
    title, *rest = lines
    drawn = [shown(title, LEFT_PT, TOP_PT, TITLE_PT)]
    y: float = TOP_PT - 2.5 * LEADING_PT
    for line in rest[: 20 if has_table else None]:
        drawn.append(shown(line, LEFT_PT, y, TEXT_PT))
        y -= LEADING_PT
    return b"".join(drawn) + (_table(y - 2 * LEADING_PT) if has_table else b"")


def _table(top: float) -> bytes:
    """Returns the operators that draw a table with ruled cells."""
    width, height, drawn = 150, 24, []
    for row in range(len(TABLE) + 1):
        y = top - row * height
        drawn.append(b"%g %g m %g %g l S\n" % (LEFT_PT, y, LEFT_PT + 3 * width, y))
    for column in range(4):
        x = LEFT_PT + column * width
        drawn.append(b"%g %g m %g %g l S\n" % (x, top, x, top - len(TABLE) * height))
    for row, cells in enumerate(TABLE):
        for column, text in enumerate(cells):
            x, y = LEFT_PT + column * width + 8, top - row * height - 16
            drawn.append(shown(text, x, y, TEXT_PT))
    return b"".join(drawn)


def report(pages: Sequence[Sequence[str]], *, has_table: bool = False) -> bytes:
    """A PDF with a text layer."""
    streams = [stream(b"", page_content(page, has_table=has_table)) for page in pages]
    return pages_pdf(streams)


def scan_of(pdf: bytes, *, dpi: int = 150, degrees: float = 0.6, seed: int = 0) -> bytes:
    """The same pages as a scanner would produce them: gray, noisy and slightly skewed, without
    text.
    """
    import pypdfium2

    chance = np.random.default_rng(seed)
    document = pypdfium2.PdfDocument(pdf)
    images, contents = {}, []
    for number in range(len(document)):
        rendered = document[number].render(scale=dpi / 72).to_pil().convert("L")
        skewed = rendered.rotate(degrees * (-1) ** number, Image.Resampling.BICUBIC, fillcolor=255)
        noisy = np.asarray(skewed, np.float32) * 0.92 + 10
        noisy += chance.normal(0, 9, noisy.shape)
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=80)
        entries = b"/Type/XObject/Subtype/Image/Width %d/Height %d/ColorSpace/DeviceGray" % (
            skewed.width,
            skewed.height,
        )
        entries += b"/BitsPerComponent 8/Filter/DCTDecode"
        name = b"Im%d" % number
        images[name] = stream(entries, file.getvalue(), is_packed=False)
        drawn = b"q %d 0 0 %d 0 0 cm /%s Do Q" % (WIDTH_PT, HEIGHT_PT, name)
        contents.append(stream(b"", drawn))
    return pages_pdf(contents, images, is_shared=False)


def images_of(pdf: bytes, *, dpi: int = 150) -> list[Image.Image]:
    import pypdfium2

    document = pypdfium2.PdfDocument(pdf)
    return [document[number].render(scale=dpi / 72).to_pil() for number in range(len(document))]


def image_file(images: Sequence[Image.Image], kind: str) -> bytes:
    """An image file. Several images produce a TIFF."""
    file = io.BytesIO()
    first, *rest = [image.convert("RGB") for image in images]
    more = {"save_all": True, "append_images": rest} if rest else {}
    first.save(file, kind, **more)
    return file.getvalue()


def _image(width: int, height: int, data: bytes) -> bytes:
    entries = b"/Type/XObject/Subtype/Image/Width %d/Height %d/ColorSpace/DeviceGray"
    return stream(entries % (width, height) + b"/BitsPerComponent 8", data)


def _zeros(size: int) -> bytes:
    """`size` zero bytes, deflated (RFC 1951): the same 1 MiB block, repeated."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x78\xda" + block * (size >> 20) + b"\x03\0" + bytes(4)


def _packed(entries: bytes, packed: bytes) -> bytes:
    return stream(entries + b"/Filter/FlateDecode", packed, is_packed=False)


def hostile_files() -> dict[str, tuple[bytes, str]]:
    """Files that must be rejected, each with part of the expected error message."""
    text = shown("fine", 72, 700, 12)
    draw = stream(b"", b"q 612 0 0 792 0 0 cm /Bad Do Q")
    image = b"/Type/XObject/Subtype/Image/ColorSpace/DeviceGray/BitsPerComponent 8"
    huge = _packed(image + b"/Width 32768/Height 32768", _zeros(1 << 30))
    encrypted = b"/Encrypt<</Filter/Standard/V 1/R 2/O(%s)/U(%s)/P -4>>/ID[(a)(a)]"
    keys = b"o" * 32, b"u" * 32
    ordinary = pages_pdf([stream(b"", text)])
    one_page = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Page/Parent 2 0 R>>"]

    def tree(root: bytes) -> bytes:
        return pdf_file([one_page[0], root, one_page[2]])

    bomb = b"/Type/ObjStm/N 1/First 4"
    return {
        "encrypted": (
            pdf_file(
                [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Count 0/Kids[]>>"],
                encrypted % keys,
            ),
            "it is encrypted",
        ),
        "broken": (b"%PDF-1.7\n" + bytes(range(256)) * 8, "it is damaged"),
        "cut": (ordinary[: len(ordinary) // 3], "it is damaged"),
        "no-document": (b"PK\3\4" + bytes(100), "not a readable PDF, PNG, JPEG, TIFF or WebP"),
        "empty-tree": (tree(b"<</Type/Pages/Count 0/Kids[]>>"), "it is damaged"),
        "loop-of-pages": (
            tree(b"<</Type/Pages/Count 3/Kids[2 0 R 2 0 R 2 0 R]>>"),
            "page 0: it is damaged",
        ),
        "many-pages": (
            tree(b"<</Type/Pages/Count 20000/Kids[%s]>>" % (b"3 0 R " * 20_000)),
            "it has 20000 pages, but the maximum is 10000",
        ),
        "object-stream": (
            pdf_file(
                [
                    b"<</Type/Catalog/Pages 2 0 R>>",
                    b"<</Type/Pages/Count 1/Kids[4 0 R]>>",
                    _packed(bomb, _zeros(4 << 30)),
                    b"<</Type/Page/Parent 2 0 R/Contents 3 0 R/MediaBox[0 0 9 9]>>",
                ]
            ),
            "reading it requires more than",
        ),
        "content-bomb": (
            pages_pdf([_packed(b"", _zeros(4 << 30))]),
            "reading it requires more than",
        ),
        "gigapixel": (pages_pdf([draw], {b"Bad": huge}), "an image of 32768x32768 pixels"),
        "many-objects": (
            pages_pdf([stream(b"", b"0 0 1 1 re f\n" * 400_000)]),
            "it has more than 200000 objects",
        ),
        "form-loop": (
            pages_pdf(
                [draw],
                {
                    b"Bad": stream(
                        b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]"
                        b"/Resources<</XObject<</Bad 4 0 R>>>>",
                        b"/Bad Do " * 50,
                    )
                },
            ),
            "reading it requires more than",
        ),
        "png-bomb": (_png_head(60_000, 60_000), "an image of 60000x60000 pixels"),
        "tiff-bomb": (_tiff_bomb(), "an image of 65000x65000 pixels"),
    }


def _png_head(width: int, height: int) -> bytes:
    """A PNG with a header that declares its size, and a few bytes of data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    sizes = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    head = chunk(b"IHDR", sizes + b"\x08\x00\x00\x00\x00")
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def _tiff(width: int, height: int, next_at: int, data: bytes = b"\0" * 8) -> bytes:
    """A gray TIFF with one directory, and the position of the next one."""
    entries = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, 1, 200),
        (278, 4, 1, height),
        (279, 4, 1, len(data)),
    ]
    packed = b"".join(
        tag.to_bytes(2, "little")
        + kind.to_bytes(2, "little")
        + count.to_bytes(4, "little")
        + value.to_bytes(4, "little")
        for tag, kind, count, value in entries
    )
    head = b"II*\0" + (8).to_bytes(4, "little") + len(entries).to_bytes(2, "little")
    whole = head + packed + next_at.to_bytes(4, "little")
    return whole.ljust(200, b"\0") + data


def odd_files() -> dict[str, bytes]:
    """Files that look hostile but can be read: each has one page."""
    tiny = stream(b"", b"q 2 0 0 2 9 9 cm /Dot Do Q\n" * 5000 + shown("fine", 72, 700, 12))
    no_size = b"<</Type/Pages/Count 1/Kids[3 0 R]/MediaBox[0 0 0 0]>>"
    return {
        "a TIFF whose directory is followed by itself": _tiff(8, 1, 8),
        "a page without a size": pdf_file(
            [b"<</Type/Catalog/Pages 2 0 R>>", no_size, b"<</Type/Page/Parent 2 0 R>>"]
        ),
        "thousands of tiny images": pages_pdf([tiny], {b"Dot": _image(2, 2, b"\0\xff\xff\0")}),
    }


def _tiff_bomb() -> bytes:
    return _tiff(65_000, 65_000, 0)
