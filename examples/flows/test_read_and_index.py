"""Runs the shipped flow with real weights, from a document to pages, text and vectors."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml

from examples.show import EXAMPLES
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.errors import ConfigurationError
from tests.bigquery_client import connected
from tests.documents import hostile_files, page_content, pages_pdf, report, scan_of, stream
from tests.end_to_end.rows import Rows
from tests.limits import START_LIMIT_S
from workers.models.custom.environments import python_for

pytestmark = pytest.mark.slow(about_s=150)

FLOW, EMBEDDER = "read-and-index", "all-MiniLM-L6-v2"
STEPS = ("cut", "read", "passages", "vectors")
PAGES = {
    "The gate of the dam": [
        "The gate of the north dam is made of oak and iron.",
        "It is raised by a winch with a chain of forty links.",
        "Two men can open it in less than ten minutes.",
    ],
    "Bread from the mill": [
        "The baker takes flour of rye and wheat in equal parts.",
        "The dough rests for a night, and is baked at dawn.",
        "A loaf weighs two pounds and costs a shilling.",
    ],
}
QUESTIONS = ("How long does it take to lift the sluice?", "What does a loaf of bread cost?")
"""Each question is about the page at the same position."""
MIN_COSINE = 0.9999


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serves the shipped flow with its models. Skips if there is no package index."""
    folder: Path = tmp_path_factory.mktemp(FLOW)
    shipped = yaml.safe_load((EXAMPLES.parent / "models.yaml").read_text(encoding="utf-8"))
    models = [entry for entry in shipped["models"] if entry["name"] == EMBEDDER]
    (ocr,) = yaml.safe_load((EXAMPLES / "ocr/models.yaml").read_text())["models"]
    models.append(ocr | {"source": f"local:{EXAMPLES / 'ocr'}"})
    for name in ("pages", "passages"):
        source = f"local:{EXAMPLES / name}"
        models.append({"name": name, "task": "custom", "source": source, "deterministic": True})
    try:
        for name in ("ocr", "pages"):
            python_for(EXAMPLES / name)
    except ConfigurationError as error:
        pytest.skip(f"packages: {error.message[-300:]}")
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    refresh_interfaces(path, lambda line: None)
    flows = yaml.safe_load((EXAMPLES / f"flows/{FLOW}.yaml").read_text())["flows"]
    path.write_text(yaml.safe_dump({"models": models, "flows": flows}))
    settings = {"PENSTOCK_MODELS_FILE": str(path)}
    with Stack(folder / "state", ports=Ports.free(len(models)), settings=settings) as running:
        yield running


def run(stack: Stack, document: bytes, **inputs: Any) -> dict[str, Any]:
    """Runs the flow and returns the finished run."""
    uri = f"data:application/pdf;base64,{base64.b64encode(document).decode()}"
    body = {"version": FLOW, "input": {"document": uri} | inputs}
    url, until_s = f"{stack.api_url}/v1/predictions", time.monotonic() + START_LIMIT_S
    result = httpx.post(url, json=body, headers={"prefer": "wait"}, timeout=START_LIMIT_S).json()
    while result["status"] not in ("succeeded", "failed", "canceled"):
        assert time.monotonic() < until_s, result
        time.sleep(0.5)
        result = httpx.get(f"{url}/{result['id']}").json()
    return dict(result)


def embedded(stack: Stack, texts: list[str]) -> Any:
    """Returns the vectors that OpenAI's client gets from the same model, [texts, dimensions]."""
    with openai.OpenAI(base_url=f"{stack.api_url}/v1", api_key="any") as client:
        reply = client.embeddings.create(model=EMBEDDER, input=texts)
    return np.array([item.embedding for item in reply.data])


def document() -> bytes:
    """Returns a scan of the pages above, with a blank page in the middle."""
    first, second = ([title, *lines] for title, lines in PAGES.items())
    return scan_of(report([first, ["", ""], second]))


@pytest.fixture(scope="module")
def indexed(stack: Stack) -> dict[str, Any]:
    result = run(stack, document())
    assert result["status"] == "succeeded", result["error"]
    return result


def test_a_scan_becomes_text_and_vectors(stack: Stack, indexed: dict[str, Any]) -> None:
    output = indexed["output"]
    assert output["numbers"] == [0, 1, 2]
    passages, vectors = output["passages"], np.array(output["vectors"])
    assert vectors.shape == (len(passages), 384)
    for number, (title, lines) in zip((0, 2), PAGES.items(), strict=True):
        ((page,),) = (candidate for at, candidate in enumerate(output["pages"]) if at == number)
        page_text = " ".join(passage["text"] for passage in passages if passage["page"] == number)
        for text in (title, *lines):
            assert text in page["markdown"]
            assert text in page_text
    assert {passage["page"] for passage in passages} == {0, 2}, "an empty page has no passage"
    expected = embedded(stack, [passage["text"] for passage in passages])
    assert (vectors * expected).sum(axis=1).min() >= MIN_COSINE
    nearest = (vectors @ embedded(stack, list(QUESTIONS)).T).argmax(axis=0)
    assert [passages[at]["page"] for at in nearest] == [0, 2]
    print(f"{len(passages)} passages, {indexed['metrics']}", file=sys.stderr)


def test_each_item_has_a_row_and_all_are_the_price(stack: Stack, indexed: dict[str, Any]) -> None:
    counts = {step["id"]: step["items"] for step in indexed["metrics"]["steps"]}
    passages = len(indexed["output"]["passages"])
    assert counts == {"cut": 1, "read": 3, "passages": 1, "vectors": passages}
    with connected(stack.settings.bigquery_endpoint, stack.settings.project) as bigquery:
        rows = Rows(bigquery, stack.settings.dataset).of([indexed["id"]], sum(counts.values()))
    for step in STEPS:
        assert sum(row["step"] == step for row in rows) == counts[step]
    cost_usd = sum(float(row["cost_usd"]) for row in rows)
    assert indexed["metrics"]["cost_usd"] == pytest.approx(cost_usd)
    assert cost_usd > 3 * 0.001, "three pages and the vectors"


def test_the_same_document_again_is_computed_by_no_model(
    stack: Stack, indexed: dict[str, Any]
) -> None:
    again = run(stack, document())
    assert again["output"] == indexed["output"]
    assert again["metrics"]["cost_usd"] == 0
    some = run(stack, document(), pages="2")
    assert some["output"]["numbers"] == [2]
    assert {passage["page"] for passage in some["output"]["passages"]} == {2}


def test_a_document_without_text_has_no_vectors(stack: Stack) -> None:
    empty = run(stack, pages_pdf([stream(b"", page_content([""]))]))
    assert empty["status"] == "succeeded", empty["error"]
    output = empty["output"]
    assert (output["numbers"], output["passages"], output["vectors"]) == ([0], [], [])


@pytest.mark.parametrize("name", ["encrypted", "cut"])
def test_what_is_wrong_with_a_document_is_named(stack: Stack, name: str) -> None:
    data, reason = hostile_files()[name]
    result = run(stack, data)
    assert result["status"] == "failed"
    assert result["error"].startswith("document: "), result["error"]
    assert reason in result["error"]
