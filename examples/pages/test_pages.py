"""Documents split into pages: identical pages have identical bytes in every document."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pypdfium2
import pytest
from PIL import Image

from examples.ocr.document import InvalidInput, chosen, divided
from tests.documents import (
    hostile_files,
    image_file,
    images_of,
    report,
    report_pages,
    scan_of,
)


def pages_in(data: bytes, folder: Path, pages: str = "") -> list[bytes]:
    folder.mkdir(exist_ok=True)
    path = folder / "document"
    path.write_bytes(data)
    return [page.read_bytes() for _, page in divided(path, folder, pages)]


def test_the_same_page_of_another_document_has_the_same_bytes(tmp_path: Path) -> None:
    first, second, third = report_pages(3)
    ones = pages_in(report([first, second]), tmp_path / "one")
    others = pages_in(report([third, second, first]), tmp_path / "other")
    assert ones == [others[2], others[1]]
    assert len({*others}) == 3
    text = pypdfium2.PdfDocument(others[0])[0].get_textpage().get_text_bounded()
    assert text.splitlines()[0] == "Chapter 3"


def test_a_page_of_a_scan_has_its_own_image_only(tmp_path: Path) -> None:
    whole = scan_of(report(report_pages(3)), dpi=50)
    pages = pages_in(whole, tmp_path)
    assert len(pages) == 3
    assert sum(map(len, pages)) < 1.2 * len(whole)


def test_images_are_one_page_and_a_tiff_has_several(tmp_path: Path) -> None:
    images = images_of(report(report_pages(2)), dpi=30)
    png = image_file(images[:1], "PNG")
    assert pages_in(png, tmp_path / "png") == [png]
    pages = pages_in(image_file(images, "TIFF"), tmp_path / "tiff")
    opened = [Image.open(io.BytesIO(page)) for page in pages]
    assert [(image.format, image.size) for image in opened] == [
        ("PNG", image.size) for image in images
    ]
    assert pages[0] != pages[1]


def test_pages_are_chosen_and_keep_their_numbers(tmp_path: Path) -> None:
    whole = report(report_pages(4))
    every = pages_in(whole, tmp_path / "all")
    assert pages_in(whole, tmp_path / "some", "2-3,0") == [every[0], every[2], every[3]]
    numbered = divided(tmp_path / "some" / "document", tmp_path / "some", "2-3,0")
    assert [number for number, _ in numbered] == [0, 2, 3]
    images = images_of(report(report_pages(2)), dpi=30)
    tiff = image_file(images, "TIFF")
    assert pages_in(tiff, tmp_path / "tiff", "1") == pages_in(tiff, tmp_path / "both")[1:]


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ("4", "page 4 does not exist; there are 4 pages"),
        ("2-1", "2-1 is a range that ends before"),
        ("one", "must be page numbers and ranges"),
    ],
)
def test_pages_that_can_t_be_chosen_are_named(pages: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        pages_in(report(report_pages(4)), tmp_path, pages)
    assert caught.value.field == "pages"


def test_a_hundred_thousand_ranges_hold_nobody_up() -> None:
    """As many ranges as fit in an input."""
    began_s = time.process_time()
    assert len(chosen(",".join(["0-9999"] * 100_000), 10_000)) == 10_000
    with pytest.raises(InvalidInput, match="page 99999 does not exist"):
        chosen(",".join(["0-99999"] * 100_000), 10_000)
    assert time.process_time() - began_s < 5


def test_more_pages_than_a_prediction_may_give_are_asked_for_in_parts(tmp_path: Path) -> None:
    whole = report([[f"page {number}"] for number in range(513)])
    with pytest.raises(InvalidInput, match="513 pages were requested, but the maximum is 512"):
        pages_in(whole, tmp_path)
    assert len(pages_in(whole, tmp_path, "1-512")) == 512


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("encrypted", "it is encrypted; remove the password"),
        ("broken", "it is damaged"),
        ("cut", "it is damaged"),
        ("many-pages", "it has 20000 pages"),
        ("no-document", "not a readable PDF"),
        ("tiff-bomb", "page 0: an image of 65000x65000 pixels"),
    ],
)
def test_what_can_t_be_divided_is_named(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        pages_in(hostile_files()[name][0], tmp_path)
    assert caught.value.field == "document"
