"""A pipeline family that no code mentions: a catalog entry is all it takes to serve it on every
endpoint.
"""

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml
from PIL import Image

from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.api.test_images import encoded
from tests.infra.running_up import ROOT, SMALLEST, wait_until
from tests.limits import WAIT_LIMIT_S
from tests.workers.models import tiny_chroma

pytestmark = [pytest.mark.slow(about_s=60), pytest.mark.filterwarnings("ignore")]
SOURCE = encoded(Image.linear_gradient("L").resize((64, 64)).convert("RGB"))
ENTRY: dict[str, Any] = {
    "name": "chroma",
    "task": "image",
    "batch": {"max_pixel_steps": 2_000_000, "max_items": 8},
    "image": {"width": 64, "height": 64, "steps": 3, "interface": "chroma.json"},
    "price": {"per_million_pixel_steps_usd": 0.02},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serves the entry, using the interface written by `penstock models check`."""
    folder = tmp_path_factory.mktemp("entries")
    source = tiny_chroma.write_folder(folder / "chroma", folder)
    catalog = {"models": [ENTRY | {"source": f"local:{source}"}]}
    (folder / "models.yaml").write_text(yaml.safe_dump(catalog))
    settings = SMALLEST | {"PENSTOCK_MODELS_FILE": str(folder / "models.yaml")}
    command = [sys.executable, "-m", "infra.cli.main", "models", "check", "chroma"]
    checked = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=True
    )
    assert "tasks: text, image" in checked.stdout
    with Stack(folder / "state", ports=Ports.free(1), settings=settings) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.api_url}/v1", api_key="none", max_retries=0, timeout=WAIT_LIMIT_S
    ) as made:
        yield made


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_both_apis_and_a_batch_line_draw_the_same_image(
    stack: Stack, client: openai.OpenAI
) -> None:
    wish = {"prompt": "a red house", "seed": 3, "negative_prompt": "fog"}
    answer = client.images.generate(model="chroma", prompt="a red house", extra_body=wish)
    (image,) = answer.data or []
    first = pixels(base64.b64decode(image.b64_json or ""))
    assert first.shape == (64, 64, 3)
    assert first.std() > 1

    body = {"version": "chroma", "input": wish}
    no_cache = {"prefer": "wait", "cache-control": "no-cache"}
    with httpx.Client(base_url=stack.api_url, timeout=WAIT_LIMIT_S) as http:
        made = http.post("/v1/predictions", json=body, headers=no_cache).json()
    assert made["status"] == "succeeded", made
    second = pixels(base64.b64decode(made["output"][0].partition(",")[2]))
    assert np.abs(first - second).max() <= 1

    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/images/generations",
        "body": {"model": "chroma", **wish},
    }
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h"
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", WAIT_LIMIT_S)
    done = client.batches.retrieve(batch.id)
    (answered,) = client.files.content(done.output_file_id or "").text.splitlines()
    third = json.loads(answered)["response"]["body"]["data"][0]["b64_json"]
    assert np.abs(first - pixels(base64.b64decode(third))).max() <= 1


def test_an_image_is_redrawn(client: openai.OpenAI) -> None:
    answer = client.images.edit(
        model="chroma", image=SOURCE, prompt="a", extra_body={"strength": 0.7, "seed": 1}
    )
    (image,) = answer.data or []
    assert pixels(base64.b64decode(image.b64_json or "")).shape == (64, 64, 3)


def test_fields_that_the_family_lacks_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="clip_skip: is not supported by chroma"):
        client.images.generate(model="chroma", prompt="a", extra_body={"clip_skip": 1})
    with pytest.raises(openai.BadRequestError, match="scheduler: chroma accepts only default"):
        client.images.generate(model="chroma", prompt="a", extra_body={"scheduler": "ddim"})
