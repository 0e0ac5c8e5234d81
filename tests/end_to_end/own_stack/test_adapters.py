"""The shipped image model with a LoRA and an IP-Adapter, through the API.

The judge, which doesn't know about the shipped LoRA, classifies its images as ink. The IP-Adapter
has random weights.
"""

import base64
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import yaml
from PIL import Image

from infra.local.ports import Ports
from infra.local.stack import Stack
from models.shapes.judge import is_ink
from models.shapes.score import held_out
from tests.api.test_images import encoded
from tests.infra.running_up import SMALLEST
from tests.limits import WAIT_LIMIT_S
from tests.workers.models import ip_adapter_files

pytestmark = pytest.mark.slow(about_s=60)

MODEL = "stable-diffusion-tiny"
FILE = Path("models/shapes/ink/ink.safetensors")
CAPTIONS = 20


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client for a stack with the shipped image model."""
    folder = tmp_path_factory.mktemp("adapters")
    catalog = yaml.safe_load(Path("models.yaml").read_text(encoding="utf-8"))
    (entry,) = (one for one in catalog["models"] if one["name"] == MODEL)
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    source = f"package:models/shapes/{FILE.parent.name}/{FILE.name}"
    entry["image"]["adapters"] = {"ink": {"source": source, "digest": f"sha256:{digest}"}}
    of_images = ip_adapter_files.write(folder / "ip", Path("models/shapes/pipeline"), 1)
    entry["image"]["ip_adapters"] = {
        "random": {"source": f"local:{of_images}", "weight_name": ip_adapter_files.WEIGHT_NAME}
    }
    (folder / "models.yaml").write_text(yaml.safe_dump({"models": [entry]}))
    settings = SMALLEST | {"PENSTOCK_MODELS_FILE": str(folder / "models.yaml")}
    with (
        Stack(folder / "state", ports=Ports.free(1), settings=settings) as running,
        openai.OpenAI(
            base_url=f"{running.api_url}/v1", api_key="none", max_retries=0, timeout=WAIT_LIMIT_S
        ) as made,
    ):
        yield made


def test_a_style_is_recognized_with_its_adapter_and_not_without(client: openai.OpenAI) -> None:
    def inks(**more: Any) -> int:
        found = 0
        for one in held_out(CAPTIONS):
            answer = client.images.generate(
                model=MODEL, prompt=one.caption, extra_body={"seed": one.seed, **more}
            )
            (image,) = answer.data or []
            with Image.open(io.BytesIO(base64.b64decode(image.b64_json or ""))) as opened:
                found += is_ink(np.asarray(opened.convert("RGB")))
        return found

    assert inks(lora_weights="ink") >= 0.9 * CAPTIONS
    assert inks() <= 0.1 * CAPTIONS


class Drawn(NamedTuple):
    """A response: a PNG file, its cost, and whether it came from the cache."""

    png: bytes
    cost_usd: float
    cache: str


def drawn(client: openai.OpenAI, **more: Any) -> Drawn:
    raw = client.images.with_raw_response.generate(
        model=MODEL, prompt="a red circle", extra_body={"seed": 1, **more}
    )
    (image,) = raw.parse().data or []
    return Drawn(
        base64.b64decode(image.b64_json or ""),
        float(raw.headers["x-penstock-cost-usd"]),
        raw.headers["x-penstock-cache"],
    )


def test_an_image_is_drawn_after_another(client: openai.OpenAI) -> None:
    def after(image: Image.Image, scale: float) -> Drawn:
        uri = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
        wish = {"ip_adapter": "random", "ip_adapter_image": uri, "ip_adapter_scale": scale}
        return drawn(client, **wish)

    dark, light = (Image.new("RGB", (90, 60), color) for color in ("black", "yellow"))
    alone, after_dark, after_light = drawn(client), after(dark, 1), after(light, 1)
    assert len({alone.png, after_dark.png, after_light.png}) == 3
    assert alone.cost_usd == after_dark.cost_usd == after_light.cost_usd > 0
    again = after(light, 1)
    assert (after_light.cache, again.cache) == ("miss", "hit")
    assert again.png == after_light.png
    assert again.cost_usd < after_light.cost_usd
    # A different scale produces a different key, and a scale of 0 has no effect.
    unscaled = after(light, 0)
    assert (unscaled.png, unscaled.cache) == (alone.png, "miss")
    with pytest.raises(openai.BadRequestError, match="has no IP-Adapter 'other'; it has random"):
        drawn(client, ip_adapter="other", ip_adapter_image="data:image/png;base64,AAAA")
