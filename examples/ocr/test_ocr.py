"""Reads documents with Mistral's client through the whole pipeline: reports, scans and malicious
files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.pipeline import another
from examples.show import EXAMPLES
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.process import free_port
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
from tests.limits import TEST_LIMIT_S, WAIT_LIMIT_S
from workers.models.custom.environments import python_for

pytestmark = pytest.mark.slow(about_s=200)

IS_LONG = "OCR_SCAN_PAGES" in os.environ
REPORT_PAGES = 38 if IS_LONG else 12
SCAN_PAGES = int(os.environ.get("OCR_SCAN_PAGES", "4"))
SCAN_LINES = None if IS_LONG else 8
"""Lines per scanned page. A whole page takes a long time. OCR_SCAN_PAGES=40 tests a long scan."""
IMAGE_LINES, IMAGE_HEIGHT_PX = 5, 400
"""Share of a page, from the top, that is sent as an image in each format."""
PAGE_USD, CACHED_SHARE = 0.001, 0.1
QUICK = ("encrypted", "cut", "many-pages", "gigapixel", "tiff-bomb", "object-stream")
"""The malicious files that the client waits to see rejected."""
FLOW = "ocr-pages"
(CLIENT,) = (client for client in CLIENTS if client.name == "mistral")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serves a model that reads documents, whole and page by page.

    Skips if there is no package index.
    """
    try:
        for name in ("ocr", "pages"):
            python_for(EXAMPLES / name)
        install(CLIENT)
    except (ConfigurationError, CannotInstall) as error:
        pytest.skip(f"packages: {str(error)[-300:]}")
    folder = tmp_path_factory.mktemp("stack")
    (entry,) = yaml.safe_load((EXAMPLES / "ocr/models.yaml").read_text())["models"]
    entry |= {"source": f"local:{EXAMPLES / 'ocr'}"}
    entry["price"] = {"per_work_usd": PAGE_USD, "cached_share": CACHED_SHARE}
    models = folder / "models.yaml"
    pages = {"name": "pages", "task": "custom", "source": f"local:{EXAMPLES / 'pages'}"}
    flows = yaml.safe_load((EXAMPLES / "flows/ocr-pages.yaml").read_text())["flows"]
    catalog = {"models": [entry, pages | {"deterministic": True}], "flows": flows}
    models.write_text(yaml.safe_dump(catalog))
    refresh_interfaces(models, lambda line: None)
    settings = {
        "PENSTOCK_KEYS_URL": keys_url(folder, default="default", other="other"),
        "PENSTOCK_MODELS_FILE": str(models),
    }
    with Stack(folder, ports=Ports.free(2), settings=settings) as running:
        yield running


def image_pdf() -> bytes:
    """Returns a page with text and an image."""
    (lines,) = report_pages(1)
    content = page_content(lines[:12]) + b"q 200 0 0 150 72 200 cm /Im0 Do Q"
    shades = bytes((x * y) % 256 for y in range(75) for x in range(100))
    entries = b"/Type/XObject/Subtype/Image/Width 100/Height 75/ColorSpace/DeviceGray"
    image = stream(entries + b"/BitsPerComponent 8", shades)
    return pages_pdf([stream(b"", content)], {b"Im0": image})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file that lists the contents of the documents in its folder."""
    folder = tmp_path_factory.mktemp("documents")
    text, scanned = report_pages(REPORT_PAGES), report_pages(SCAN_PAGES, first=REPORT_PAGES)
    scanned = [lines[:SCAN_LINES] for lines in scanned]
    few = report_pages(1)[0][:10]
    written = {
        "report.pdf": report(text),
        "scan.pdf": scan_of(report(scanned)),
        "table.pdf": report([few], has_table=True),
        "image.pdf": image_pdf(),
        "other.pdf": scan_of(report([scanned[0], few[:SCAN_LINES]])),
    }
    image_lines = few[:IMAGE_LINES]
    images = [
        image.crop((0, 0, image.width, IMAGE_HEIGHT_PX))
        for image in images_of(report([image_lines]))
    ]
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
        "image_lines": image_lines,
        "images": ["page.png", "page.jpeg", "page.webp", "pages.tiff"],
        "hostile": {name: hostile[name][1] for name in QUICK},
        "page_usd": PAGE_USD,
        "cached_share": CACHED_SHARE,
        "other_key": key_for("other"),
    }
    path = folder / "expected.json"
    path.write_text(json.dumps(facts))
    return path


def check_client(stack: Stack, expected: Path) -> None:
    service = Service(stack.api_url, key_for("default"), "", "", expected=str(expected))
    outcomes, took_s = run_checks(command_of(CLIENT), service)
    figures = (expected.parent / "figures.txt").read_text()
    print(f"{len(outcomes)} checks in {took_s:.0f} s\n{figures}", file=sys.stderr)
    failed = [
        f"{outcome.check}: {outcome.reason}" for outcome in outcomes if outcome.outcome == "failed"
    ]
    assert not failed, "\n".join(failed)
    assert len(outcomes) > 8


def test_mistrals_client_reads_documents(stack: Stack, expected: Path) -> None:
    check_client(stack, expected)


def test_mistrals_client_reads_page_by_page_while_a_worker_is_killed(
    stack: Stack, expected: Path
) -> None:
    path = expected.with_name("expected-of-flow.json")
    facts = json.loads(expected.read_text()) | {"model": FLOW, "is_flow": True}
    path.write_text(json.dumps(facts))
    port = free_port()
    own = {"PENSTOCK_MODEL": "ocr", "PENSTOCK_HEALTH_PORT": str(port)}
    with (
        another(stack, "another-worker", "workers", port, own),
        ThreadPoolExecutor(1) as threads,
    ):
        killing = threads.submit(kill_in_the_middle, stack)
        check_client(stack, path)
        at_kill, pages = killing.result(WAIT_LIMIT_S)
    assert 0 < at_kill < SCAN_PAGES, "the worker did not die in the middle"
    assert pages == list(range(SCAN_PAGES))
    print(f"{at_kill} of {SCAN_PAGES} pages were read at the kill", file=sys.stderr)


def kill_in_the_middle(stack: Stack) -> tuple[int, list[int]]:
    """Kills a worker once half of the scan has been read.

    Returns how many pages had been read by then, and the pages in streaming order.
    """
    headers = {"authorization": f"Bearer {key_for('default')}"}
    options: dict[str, Any] = {"headers": headers, "timeout": WAIT_LIMIT_S}
    seen, until_s = set[str](), time.monotonic() + TEST_LIMIT_S
    with httpx.Client(base_url=stack.api_url, **options) as http:
        while time.monotonic() < until_s:
            listed = http.get("/v1/predictions")
            if listed.status_code == HTTPStatus.SERVICE_UNAVAILABLE:  # Redis was slow, so try again
                time.sleep(1.0)
                continue
            ours = [
                prediction_facts["id"]
                for prediction_facts in listed.raise_for_status().json()["results"]
                if prediction_facts["model"].endswith(FLOW)
            ]
            for prediction in (
                prediction_id for prediction_id in ours if prediction_id not in seen
            ):
                seen.add(prediction)
                if (killed := followed(http, prediction, stack)) is not None:
                    return killed
            time.sleep(0.1)
    raise AssertionError("the scan was never sent")


def followed(http: httpx.Client, prediction: str, stack: Stack) -> tuple[int, list[int]] | None:
    """Follows a prediction.

    Kills a worker if the prediction is reading the scan; otherwise returns None.
    """
    at_kill, pages = 0, list[int]()
    headers = {"accept": "text/event-stream"}
    with http.stream("GET", f"/v1/predictions/{prediction}/stream", headers=headers) as answer:
        for line in answer.raise_for_status().iter_lines():
            event = json.loads(line[6:]) if line.startswith('data: {"step"') else {}
            if event.get("step") == "cut" and len(event["output"]["pages"]) != SCAN_PAGES:
                return None
            if event.get("step") == "read":
                pages.append(event["item"])
                if not at_kill and len(pages) >= SCAN_PAGES / 2:
                    at_kill = len(pages)
                    stack.processes["worker-ocr"].kill()
    return at_kill, pages
