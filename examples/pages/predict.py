"""Divides a document into its pages, each a document of its own: the first step of a flow.

Equal pages have equal bytes whatever document they come from, so a model that reads pages finds
those that it has read before in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path as LocalPath
from typing import Any

import pypdfium2
from cog import BasePredictor, Input, Path
from PIL import Image

MAX_PAGES = 10_000
MAX_IMAGE_PX = 100_000_000
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
PASSWORD_ERROR = 4
"""FPDF_ERR_PASSWORD."""
CLOCK_POLICY = 0
"""FPDF_POLICY_MACHINETIME_ACCESS: whether new files say when they were made."""
FILE_ID = re.compile(rb"/ID\s*\[\s*<[0-9A-Fa-f]*>\s*<[0-9A-Fa-f]*>\s*\]")


class WrongInput(ValueError):
    """An input that this model does not take."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def pages_of(path: LocalPath, folder: LocalPath) -> Iterator[LocalPath]:
    """Yields a file for each page: a PDF of a PDF, a PNG of a TIFF, and other images as they are.

    Raises:
        WrongInput: the document can't be read.
    """
    with path.open("rb") as file:
        is_pdf = b"%PDF-" in file.read(1024)
    yield from pdf_pages(path, folder) if is_pdf else image_pages(path, folder)


def pdf_pages(path: LocalPath, folder: LocalPath) -> Iterator[LocalPath]:
    """Yields a PDF for each page."""
    pypdfium2.raw.FPDF_SetSandBoxPolicy(CLOCK_POLICY, 0)
    whole = opened(path)
    for number in range(len(whole)):
        one = pypdfium2.PdfDocument.new()
        try:
            one.import_pages(whole, [number])
        except pypdfium2.PdfiumError as error:
            raise WrongInput("document", f"page {number}: it is broken") from error
        page = folder / f"{number}.pdf"
        one.save(page)
        one.close()
        # PDFium makes the identifier of a file of chance.
        page.write_bytes(FILE_ID.sub(b"/ID[<00><00>]", page.read_bytes()))
        yield page


def opened(path: LocalPath) -> Any:
    """A PDF whose pages can be counted.

    Raises:
        WrongInput: it is encrypted, broken, or has too many pages.
    """
    try:
        whole = pypdfium2.PdfDocument(path)
        count = len(whole)
    except pypdfium2.PdfiumError as error:
        is_encrypted = getattr(error, "err_code", 0) == PASSWORD_ERROR
        reason = "it is encrypted; send it without a password" if is_encrypted else "it is broken"
        raise WrongInput("document", reason) from error
    if not 0 < count <= MAX_PAGES:
        raise WrongInput("document", f"it has {count} pages, and 1 to {MAX_PAGES} are read")
    return whole


def image_pages(path: LocalPath, folder: LocalPath) -> Iterator[LocalPath]:
    """Yields the image, or one for each page of a TIFF."""
    Image.MAX_IMAGE_PIXELS = None  # MAX_IMAGE_PX says how large it may be
    try:
        with Image.open(path, formats=FORMATS) as file:
            yield from tiff_pages(file, folder) if file.format == "TIFF" else [path]
    except WrongInput:
        raise
    except Exception as error:  # decoders report what is broken in many ways
        raise WrongInput("document", "no PDF, PNG, JPEG, TIFF or WebP that can be read") from error


def tiff_pages(file: Image.Image, folder: LocalPath) -> Iterator[LocalPath]:
    """Yields an image for each page of a TIFF."""
    for number in range(MAX_PAGES):
        try:
            file.seek(number)
        except EOFError:
            return
        if file.width * file.height > MAX_IMAGE_PX:
            raise WrongInput("document", f"page {number}: more than {MAX_IMAGE_PX} pixels")
        page = folder / f"{number}.png"
        file.save(page, "PNG", dpi=file.info.get("dpi"))
        yield page
    raise WrongInput("document", f"more than {MAX_PAGES} pages")


class Predictor(BasePredictor):
    """Divides documents."""

    def predict(
        self, document: Path = Input(description="PDF, PNG, JPEG, TIFF or WebP.")
    ) -> Iterator[Path]:
        """Yields each page as a file."""
        for page in pages_of(LocalPath(document), LocalPath.cwd()):
            yield Path(page)
