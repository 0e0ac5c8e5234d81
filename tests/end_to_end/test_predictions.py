"""Predictions through the whole pipeline, with Replicate's client: run, followed, canceled,
repeated.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
from replicate.client import Client

from infra.local.stack import Stack
from shared.models.catalog_file import read_catalog
from tests.end_to_end.conftest import EMBEDDER, KEY, Embed
from tests.end_to_end.rows import Rows, eventually
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

PAINTER = "stable-diffusion-tiny"
SLOW = {"width": 256, "height": 256, "num_inference_steps": 100}
"""Takes far longer than it takes to cancel."""


@pytest.fixture(scope="module")
def replicating(stack: Stack) -> Iterator[Any]:
    """Untyped, so that tests can inspect any response."""
    made = Client(api_token=KEY, base_url=stack.api_url)
    yield made
    made._client.close()


def test_text_becomes_its_vector(
    stack: Stack, replicating: Any, reference: Embed, text: str
) -> None:
    vector = replicating.run(f"any/{EMBEDDER}", input={"text": text})
    assert (
        np.dot(vector, reference(text))
        >= read_catalog(stack.settings.models_file).find(EMBEDDER).tolerance.cosine
    )


def test_images_are_drawn_and_each_has_its_row(replicating: Any, rows: Rows, text: str) -> None:
    created = replicating.predictions.create(
        version=PAINTER, input={"prompt": text, "num_outputs": 2}, wait=30
    )
    assert created.status == "succeeded"
    assert created.progress is None or created.progress.percentage == 1
    assert created.metrics["predict_time"] > 0
    assert [image.partition(",")[0] for image in created.output] == ["data:image/png;base64"] * 2
    found = rows.of([created.id], count=2)
    assert [(row["row_id"], row["status"]) for row in found] == [
        (f"{created.id}:{n}", "succeeded") for n in range(2)
    ]


def test_canceled_image_stops_at_its_next_step(replicating: Any, rows: Rows, text: str) -> None:
    created = replicating.predictions.create(version=PAINTER, input={"prompt": text, **SLOW})

    def is_drawing() -> bool:
        created.reload()
        return created.progress is not None and created.progress.current > 0

    eventually(is_drawing, WAIT_LIMIT_S)
    created.cancel()
    assert created.status == "canceled"
    (row,) = rows.of([created.id])
    assert row["status"] == "canceled"
    assert 0 < row["steps_saved"] < SLOW["num_inference_steps"]
    created.reload()
    assert (created.status, created.output) == ("canceled", None)


def test_repeated_put_is_computed_once(stack: Stack, rows: Rows, text: str) -> None:
    url = f"{stack.api_url}/v1/predictions/{uuid4().hex}"
    body = {"version": EMBEDDER, "input": {"texts": [text]}}
    headers = {"authorization": f"Bearer {KEY}", "prefer": "wait"}
    with ThreadPoolExecutor(4) as pool, httpx.Client(headers=headers, timeout=WAIT_LIMIT_S) as http:
        answers = list(pool.map(lambda _: http.put(url, json=body), range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["status"] == "succeeded"
