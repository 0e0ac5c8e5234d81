"""Draws, checks and enlarges an image with real weights: as the shipped flow, and as requests to an
image model whose entry names both steps."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from PIL import Image

from examples.oracles import fetched
from examples.show import EXAMPLES
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.limits import START_LIMIT_S

pytestmark = pytest.mark.slow(about_s=80)
ROOT = EXAMPLES.parent
PROMPT = "a large red circle on a blue background"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: Any) -> Iterator[Stack]:
    """Serves the shipped flow, a variant that enlarges only unsafe images, and two image models
    with steps after the image."""
    folder: Path = tmp_path_factory.mktemp("draw-checked")
    shipped = yaml.safe_load((ROOT / "models.yaml").read_text(encoding="utf-8"))["models"]
    (tiny,) = [entry for entry in shipped if entry["name"] == "stable-diffusion-tiny"]
    # With a threshold of 0, no image is safe.
    models = [
        tiny | {"name": name, "aliases": [], "image": tiny["image"] | after}
        for name, after in {
            tiny["name"]: {"upscale": {"model": "upscale"}, "safety": {"model": "safety"}},
            "never-safe": {"safety": {"model": "safety", "threshold": 0.0}},
        }.items()
    ]
    for name in ("safety", "upscale"):
        fetched(name)
        entries = yaml.safe_load((EXAMPLES / name / "models.yaml").read_text(encoding="utf-8"))
        models += [entry | {"source": f"local:{EXAMPLES / name}"} for entry in entries["models"]]
    text = (EXAMPLES / "flows/draw-checked.yaml").read_text(encoding="utf-8")
    other = text.replace("name: draw-checked", "name: draw-unsafe")
    other = other.replace("$check.is_safe == true", "$check.is_safe == false")
    flows = [flow for source in (text, other) for flow in yaml.safe_load(source)["flows"]]
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": models}), encoding="utf-8")
    refresh_interfaces(path, print)
    path.write_text(yaml.safe_dump({"models": models, "flows": flows}), encoding="utf-8")
    settings = {"PENSTOCK_MODELS_FILE": str(path)}
    with Stack(folder / "state", ports=Ports.free(len(models)), settings=settings) as running:
        yield running


def run(stack: Stack, flow: str) -> dict[str, Any]:
    """Runs a flow and returns the finished run."""
    body = {"version": flow, "input": {"prompt": PROMPT, "scale": 2}}
    url, until_s = f"{stack.api_url}/v1/predictions", time.monotonic() + START_LIMIT_S
    result = httpx.post(url, json=body, headers={"prefer": "wait"}, timeout=START_LIMIT_S).json()
    while result["status"] not in ("succeeded", "failed", "canceled"):
        assert time.monotonic() < until_s, result
        time.sleep(0.5)
        result = httpx.get(f"{url}/{result['id']}").json()
    return dict(result)


def data_of(uri: str) -> bytes:
    """Returns the bytes of a `data:` URI or a link."""
    if uri.startswith("data:"):
        return base64.b64decode(uri.partition(",")[2])
    return httpx.get(uri).content


def test_what_is_safe_is_enlarged(stack: Stack) -> None:
    result = run(stack, "draw-checked")
    assert result["status"] == "succeeded", result["error"]
    output = result["output"]
    assert output["is_safe"] is True
    assert 0 <= output["nsfw"] < 0.5
    assert [(step["id"], step["items"]) for step in result["metrics"]["steps"]] == [
        ("image", 1),
        ("check", 1),
        ("large", 1),
    ]
    steps_usd = sum(step["cost_usd"] for step in result["metrics"]["steps"])
    assert result["metrics"]["cost_usd"] == pytest.approx(steps_usd)
    with Image.open(io.BytesIO(data_of(output["image"]))) as image:
        assert image.size == (128, 128), "twice what the model draws"
        middle = image.convert("RGB").crop((64, 64, 65, 65)).tobytes()
    assert middle[0] > 2 * middle[1], "the circle is in the middle, and red"


def test_what_is_not_is_left_out(stack: Stack) -> None:
    result = run(stack, "draw-unsafe")
    assert result["status"] == "succeeded", result["error"]
    assert result["output"]["image"] is None
    assert [step["items"] for step in result["metrics"]["steps"]] == [1, 1, 0]


def test_openai_requests_are_checked_and_enlarged(stack: Stack) -> None:
    client = openai.OpenAI(
        base_url=f"{stack.api_url}/v1", api_key="any", timeout=START_LIMIT_S, max_retries=0
    )
    raw = client.images.with_raw_response.generate(
        model="stable-diffusion-tiny", prompt=PROMPT, extra_body={"seed": 7, "upscale": 2}
    )
    reply = raw.parse()
    assert reply.size == "128x128"
    assert reply.data is not None
    (drawn,) = reply.data
    assert drawn.b64_json is not None
    with Image.open(io.BytesIO(base64.b64decode(drawn.b64_json))) as image:
        assert image.size == (128, 128)
        middle = image.convert("RGB").crop((64, 64, 65, 65)).tobytes()
    assert middle[0] > 2 * middle[1], "the circle is in the middle, and red"
    prediction = httpx.get(stack.api_url + raw.headers["location"]).json()
    assert prediction["model"] == "penstock/stable-diffusion-tiny"
    assert [(step["id"], step["items"]) for step in prediction["metrics"]["steps"]] == [
        ("image", 1),
        ("safety", 1),
        ("upscale", 1),
    ]
    cost = float(raw.headers["x-penstock-cost-usd"])
    assert 0 < cost == pytest.approx(prediction["metrics"]["cost_usd"], abs=1e-9)


def test_an_image_that_is_flagged_is_withheld(stack: Stack) -> None:
    client = openai.OpenAI(
        base_url=f"{stack.api_url}/v1", api_key="any", timeout=START_LIMIT_S, max_retries=0
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(model="never-safe", prompt=PROMPT, extra_body={"seed": 7})
    assert caught.value.code == "moderation_blocked"
    assert float(caught.value.response.headers["x-penstock-cost-usd"]) > 0
