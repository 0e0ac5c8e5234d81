"""Documents that are divided into pages: equal pages have equal bytes, whatever they come from."""

from __future__ import annotations

import io
from pathlib import Path

import pypdfium2
import pytest
from PIL import Image

from examples.pages.predict import WrongInput, pages_of
from tests.documents import (
    hostile_files,
    image_file,
    images_of,
    report,
    report_pages,
    scan_of,
)


def divided(data: bytes, folder: Path) -> list[bytes]:
    folder.mkdir(exist_ok=True)
    path = folder / "document"
    path.write_bytes(data)
    return [page.read_bytes() for page in pages_of(path, folder)]


def test_the_same_page_of_another_document_has_the_same_bytes(tmp_path: Path) -> None:
    first, second, third = report_pages(3)
    ones = divided(report([first, second]), tmp_path / "one")
    others = divided(report([third, second, first]), tmp_path / "other")
    assert ones == [others[2], others[1]]
    assert len({*others}) == 3
    text = pypdfium2.PdfDocument(others[0])[0].get_textpage().get_text_bounded()
    assert text.splitlines()[0] == "Chapter 3"


def test_a_page_of_a_scan_has_its_own_image_only(tmp_path: Path) -> None:
    whole = scan_of(report(report_pages(3)), dpi=50)
    pages = divided(whole, tmp_path)
    assert len(pages) == 3
    assert sum(map(len, pages)) < 1.2 * len(whole)


def test_images_are_one_page_and_a_tiff_has_several(tmp_path: Path) -> None:
    images = images_of(report(report_pages(2)), dpi=30)
    png = image_file(images[:1], "PNG")
    assert divided(png, tmp_path / "png") == [png]
    pages = divided(image_file(images, "TIFF"), tmp_path / "tiff")
    opened = [Image.open(io.BytesIO(page)) for page in pages]
    assert [(one.format, one.size) for one in opened] == [("PNG", one.size) for one in images]
    assert pages[0] != pages[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("encrypted", "it is encrypted"),
        ("broken", "it is broken"),
        ("many-pages", "it has 20000 pages"),
        ("no-document", "that can be read"),
        ("tiff-bomb", "page 0: more than 100000000 pixels"),
    ],
)
def test_what_can_t_be_divided_is_named(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=reason) as caught:
        divided(hostile_files()[name][0], tmp_path)
    assert caught.value.field == "document"
