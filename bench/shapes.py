"""The shipped image model on one core: seconds per image, and until a worker is ready."""

from __future__ import annotations

import base64
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from bench.pipeline import Part, another, only_model, say_nothing
from bench.report import Figure, Outcome
from infra.local.ports import Ports
from infra.local.process import free_port
from infra.local.stack import Stack
from shared.catalog import Model
from shared.catalog_file import read_catalog

IMAGES = 10
STARTS = 3
TOGETHER = 8
"""Images of one request, which make one batch."""
STRENGTH = 0.6
PROMPT = "a large red circle on a white background"
EDIT_PROMPT = "a large blue circle on a white background"
CALL_LIMIT_S = 60.0
Ask = Callable[[int], Any]


def run() -> Outcome:
    """Images from text and from images, one after the other and eight at once, each with a seed."""
    model = read_catalog(Path("models.yaml")).default("image")
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "PENSTOCK_MODELS_FILE": str(only_model(Path(folder), model.name, {})),
            "PENSTOCK_PROCESSES": "1",
            "PENSTOCK_THREADS": "1",
        }
        with Stack(Path(folder), ports=Ports.free(1), settings=settings, say=say_nothing) as stack:
            text, image, together = _images(stack, model)
            starts = [_worker_start(stack, model) for _ in range(STARTS)]
    steps = f"{model.image.steps} steps"
    return Outcome(
        [
            Figure(
                f"image from text, {steps}, guidance, one core: model",
                text["model_s"],
                "s",
                "<=",
                2.0,
            ),
            Figure("image from text: CPU of the model process", text["cpu_s"], "s"),
            Figure("image from text: round trip", text["round_trip_s"], "s"),
            Figure(
                f"{TOGETHER} images at once: CPU of the model process an image",
                together["cpu_s"] / TOGETHER,
                "s",
            ),
            Figure(
                f"{TOGETHER} at once over one, CPU an image",
                together["cpu_s"] / TOGETHER / text["cpu_s"],
                "",
                "<=",
                1.0,
            ),
            Figure(f"image from an image, strength {STRENGTH:g}: model", image["model_s"], "s"),
            Figure(
                "worker, start to ready",
                statistics.median(ready_s for ready_s, _ in starts),
                "s",
                "<=",
                15.0,
            ),
            Figure("worker, CPU until ready", statistics.median(cpu_s for _, cpu_s in starts), "s"),
        ],
        {"ready_s": [ready_s for ready_s, _ in starts]},
    )


def _images(
    stack: Stack, model: Model
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Medians for images from text, for image-to-image, and for several at once."""
    worker = Part(stack.ports.health[0])
    size: Any = f"{model.image.width}x{model.image.height}"
    asked = {"model": model.name, "size": size}
    with openai.OpenAI(
        base_url=f"{stack.api_url}/v1", api_key="none", max_retries=0, timeout=CALL_LIMIT_S
    ) as client:

        def draw(seed: int, images: int = 1) -> Any:
            extra = {"seed": seed}
            return client.images.with_raw_response.generate(
                prompt=PROMPT, n=images, extra_body=extra, **asked
            )

        def draw_together(number: int) -> Any:
            return draw(1000 * number, TOGETHER)  # the seeds of a request follow each other

        source = base64.b64decode(draw(0).parse().data[0].b64_json)

        def redraw(seed: int) -> Any:
            file = ("source.png", source, "image/png")
            extra = {"seed": seed, "strength": STRENGTH}
            return client.images.with_raw_response.edit(
                image=file, prompt=EDIT_PROMPT, extra_body=extra, **asked
            )

        return _timed(draw, worker), _timed(redraw, worker), _timed(draw_together, worker)


def _timed(ask: Ask, worker: Part) -> dict[str, float]:
    model_s, round_trip_s = [], []
    cpu_before_s = worker.children_cpu_s()
    for seed in range(1, IMAGES + 1):
        began_s = time.perf_counter()
        answer = ask(seed)
        round_trip_s.append(time.perf_counter() - began_s)
        if answer.headers["x-penstock-cache"] != "miss":
            raise RuntimeError("an image came from the cache")
        model_s.append(float(answer.headers["x-penstock-inference-ms"]) / 1000)
    return {
        "model_s": statistics.median(model_s),
        "cpu_s": (worker.children_cpu_s() - cpu_before_s) / IMAGES,
        "round_trip_s": statistics.median(round_trip_s),
    }


def _worker_start(stack: Stack, model: Model) -> tuple[float, float]:
    """Seconds until one more worker is ready, and CPU seconds of it and its model process."""
    port = free_port()
    variables = {"PENSTOCK_MODEL": model.name, "PENSTOCK_HEALTH_PORT": str(port)}
    with another(stack, "another-worker", "workers", port, variables) as worker:
        return worker.ready_s, worker.cpu_s() + worker.children_cpu_s()
