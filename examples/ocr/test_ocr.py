"""Documents that are read by Mistral's client through a whole pipeline: reports, scans, and files
that nobody should read on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.show import EXAMPLES
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.errors import ConfigurationError
from tests.clients.clients import CLIENTS
from tests.clients.environments import CannotInstall, command_of, install
from tests.clients.running import Service, run_checks
from tests.documents import (
    TABLE,
    hostile_files,
    image_file,
    images_of,
    page_content,
    pages_pdf,
    report,
    report_pages,
    scan_of,
    stream,
)
from tests.keys import key_for, keys_url
from workers.models.custom.environments import python_for

pytestmark = pytest.mark.slow(about_s=240)

REPORT_PAGES, SCAN_PAGES = 38, int(os.environ.get("OCR_SCAN_PAGES", "3"))
"""A scan takes seconds a page. OCR_SCAN_PAGES=40 tries a long one."""
PAGE_USD, CACHED_SHARE = 0.001, 0.1
QUICK = ("encrypted", "cut", "many-pages", "gigapixel", "tiff-bomb", "object-stream")
"""Those of the hostile files whose end the client waits for."""
(CLIENT,) = (one for one in CLIENTS if one.name == "mistral")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a stack that reads documents. Skips without a package index."""
    try:
        python_for(EXAMPLES / "ocr")
        install(CLIENT)
    except (ConfigurationError, CannotInstall) as error:
        pytest.skip(f"packages: {str(error)[-300:]}")
    folder = tmp_path_factory.mktemp("stack")
    (entry,) = yaml.safe_load((EXAMPLES / "ocr/models.yaml").read_text())["models"]
    entry |= {"source": f"local:{EXAMPLES / 'ocr'}"}
    entry["price"] = {"per_work_usd": PAGE_USD, "cached_share": CACHED_SHARE}
    models = folder / "models.yaml"
    models.write_text(yaml.safe_dump({"models": [entry]}))
    refresh_interfaces(models, lambda line: None)
    settings = {
        "PENSTOCK_KEYS_URL": keys_url(folder, default="default", other="other"),
        "PENSTOCK_MODELS_FILE": str(models),
    }
    with Stack(folder, ports=Ports.free(1), settings=settings) as stack:
        yield stack.api_url


def image_pdf() -> bytes:
    """A page with a text and an image."""
    (lines,) = report_pages(1)
    content = page_content(lines[:12]) + b"q 200 0 0 150 72 200 cm /Im0 Do Q"
    shades = bytes((x * y) % 256 for y in range(75) for x in range(100))
    entries = b"/Type/XObject/Subtype/Image/Width 100/Height 75/ColorSpace/DeviceGray"
    image = stream(entries + b"/BitsPerComponent 8", shades)
    return pages_pdf([stream(b"", content)], {b"Im0": image})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what is in the documents beside it."""
    folder = tmp_path_factory.mktemp("documents")
    text, scanned = report_pages(REPORT_PAGES), report_pages(SCAN_PAGES, first=REPORT_PAGES)
    few = report_pages(1)[0][:10]
    written = {
        "report.pdf": report(text),
        "scan.pdf": scan_of(report(scanned)),
        "table.pdf": report([few], has_table=True),
        "image.pdf": image_pdf(),
    }
    images = images_of(report([few]))
    for name in ("page.png", "page.jpeg", "page.webp"):
        written[name] = image_file(images, name.partition(".")[2].upper())
    written["pages.tiff"] = image_file(images * 2, "TIFF")
    hostile = hostile_files()
    written |= {name: hostile[name][0] for name in QUICK}
    for name, data in written.items():
        (folder / name).write_bytes(data)
    facts: dict[str, Any] = {
        "report": text,
        "scan": scanned,
        "table": TABLE,
        "image_lines": few,
        "images": ["page.png", "page.jpeg", "page.webp", "pages.tiff"],
        "hostile": {name: hostile[name][1] for name in QUICK},
        "page_usd": PAGE_USD,
        "cached_share": CACHED_SHARE,
        "other_key": key_for("other"),
    }
    path = folder / "expected.json"
    path.write_text(json.dumps(facts))
    return path


def test_mistrals_client_reads_documents(url: str, expected: Path) -> None:
    service = Service(url, key_for("default"), "", "", expected=str(expected))
    outcomes, took_s = run_checks(command_of(CLIENT), service)
    figures = (expected.parent / "figures.txt").read_text()
    print(f"{len(outcomes)} checks in {took_s:.0f} s\n{figures}", file=sys.stderr)
    failed = [f"{one.check}: {one.reason}" for one in outcomes if one.outcome != "passed"]
    assert not failed, "\n".join(failed)
    assert len(outcomes) > 8
