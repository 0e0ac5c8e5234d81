"""The shipped adapter through the API: the judge, which does not know of it, calls images ink."""

import base64
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import yaml
from PIL import Image

from infra.local.ports import Ports
from infra.local.stack import Stack
from models.shapes.judge import is_ink
from models.shapes.score import held_out
from tests.infra.running_up import SMALLEST
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=60)

MODEL = "stable-diffusion-tiny"
FILE = Path("models/shapes/ink/ink.safetensors")
CAPTIONS = 20


@pytest.fixture
def client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """Of a stack with the shipped image model and its adapter."""
    catalog = yaml.safe_load(Path("models.yaml").read_text(encoding="utf-8"))
    (entry,) = (one for one in catalog["models"] if one["name"] == MODEL)
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    source = f"package:models/shapes/{FILE.parent.name}/{FILE.name}"
    entry["image"]["adapters"] = {"ink": {"source": source, "digest": f"sha256:{digest}"}}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": [entry]}))
    settings = SMALLEST | {"PENSTOCK_MODELS_FILE": str(tmp_path / "models.yaml")}
    with (
        Stack(tmp_path / "state", ports=Ports.free(1), settings=settings) as running,
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
