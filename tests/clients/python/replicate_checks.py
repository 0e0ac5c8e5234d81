"""Replicate's own client: runs, predictions, streams, files and webhooks, including async."""

from __future__ import annotations

import asyncio
import io
import os
import queue
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    LIMIT_S,
    PAINTER,
    PROMPT,
    URL,
    WRONG_KEY,
    assert_png,
    assert_same,
    check,
    fresh,
    half_png,
    main,
    needs_keys,
    needs_same_machine,
    raises,
    serving,
    vectors,
)

# Settings for module-level functions, such as replicate.run.
os.environ |= {"REPLICATE_BASE_URL": URL, "REPLICATE_API_TOKEN": KEY}

import replicate
from replicate.client import Client
from replicate.exceptions import ReplicateError
from replicate.helpers import FileOutput
from replicate.webhook import Webhooks

TEXT_REF, IMAGE_REF = f"any/{EMBEDDER}", f"any/{PAINTER}"
SMALL = {"prompt": PROMPT, "width": 64, "height": 64}
SLOW = {"prompt": PROMPT, "width": 256, "height": 256, "num_inference_steps": 100}
"""Takes far longer than it takes to cancel."""
client: Any = Client(api_token=KEY, base_url=URL)
"""Untyped, so that checks can inspect any response."""


@check
def run_of_the_module_gives_a_vector() -> None:
    (text,) = fresh(1)
    vector: Any = replicate.run(TEXT_REF, input={"text": text})
    assert_same([vector], vectors([text]))


@check
def run_of_texts_gives_vectors_in_order() -> None:
    texts = fresh(10)
    assert_same(client.run(TEXT_REF, input={"texts": texts}), vectors(texts))


@check
def run_gives_images_as_files() -> None:
    images = client.run(IMAGE_REF, input={**SMALL, "num_outputs": 2})
    assert len(images) == 2
    for image in images:
        assert isinstance(image, FileOutput)
        assert_png(image.read())


@check
def run_of_a_version() -> None:
    version = client.models.get(TEXT_REF).latest_version
    (text,) = fresh(1)
    vector = client.run(f"{TEXT_REF}:{version.id}", input={"text": text})
    assert_same([vector], vectors([text]))


@check
def run_without_waiting_is_polled() -> None:
    images = client.run(IMAGE_REF, input=SMALL, wait=False)
    assert_png(images[0].read())


@check
def prediction_created_waited_for_and_read() -> None:
    (text,) = fresh(1)
    created = client.predictions.create(version=EMBEDDER, input={"text": text})
    created.wait()
    assert created.status == "succeeded"
    assert_same([created.output], vectors([text]))
    found = client.predictions.get(created.id)
    assert (found.id, found.output) == (created.id, created.output)
    assert found.metrics["predict_time"] >= 0


@check
def prediction_of_a_model_and_of_a_deployment() -> None:
    texts = fresh(2)
    made = [
        client.models.predictions.create(TEXT_REF, input={"text": texts[0]}, wait=30),
        client.deployments.predictions.create(TEXT_REF, input={"text": texts[1]}, wait=30),
    ]
    assert_same([one.output for one in made], vectors(texts))


@check
def prediction_canceled() -> None:
    created = client.predictions.create(version=PAINTER, input=SLOW)
    created.cancel()
    created.wait()
    assert (created.status, created.output) == ("canceled", None)


@check
def predictions_listed_newest_first() -> None:
    made = [
        client.predictions.create(version=EMBEDDER, input={"text": text}, wait=30).id
        for text in fresh(2)
    ]
    assert [one.id for one in client.predictions.list()][:2] == made[::-1]


@check
def stream_of_events() -> None:
    created = client.models.predictions.create(TEXT_REF, input={"texts": fresh(3)})
    kinds = [event.event.value for event in created.stream()]
    assert kinds[-4:] == ["output"] * 3 + ["done"], kinds


@check
def file_as_input() -> None:
    source = io.BytesIO(client.run(IMAGE_REF, input=SMALL)[0].read())
    source.name = "circle.png"
    blue = "a large blue circle on a white background"
    images = client.run(IMAGE_REF, input={"prompt": blue, "image": source, "prompt_strength": 0.6})
    assert_png(images[0].read())


@check
def image_redrawn_within_a_mask() -> None:
    source = io.BytesIO(client.run(IMAGE_REF, input=SMALL)[0].read())
    source.name = "circle.png"
    mask = io.BytesIO(half_png())
    mask.name = "mask.png"
    wish = {"prompt": "a blue square on the right", "image": source, "mask": mask, "mask_blur": 2}
    (image,) = client.run(IMAGE_REF, input=wish)
    redrawn = image.read()
    assert_png(redrawn)
    assert redrawn != source.getvalue()


@check
def file_uploaded_and_read() -> None:
    made = client.files.create(io.BytesIO(b"any bytes"), filename="any.bin")
    assert client.files.get(made.id).size == len(b"any bytes")


@check
def webhook_is_called_and_valid() -> None:
    needs_same_machine()
    calls: queue.Queue[tuple[dict[str, str], str]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            calls.put(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Keeps request logs out of the output."""

    with serving(Receiver) as url:
        created = client.predictions.create(
            version=EMBEDDER,
            input={"text": fresh(1)[0]},
            webhook=f"{url}/done",
            webhook_events_filter=["completed"],
        )
        headers, body = calls.get(timeout=LIMIT_S)
    secret: Any = client.webhooks.default.secret()
    Webhooks.validate(headers=headers, body=body, secret=secret)
    with raises(ValueError):
        Webhooks.validate(headers=headers, body=body + " ", secret=secret)
    assert created.id in body


@check
def models_listed_and_found() -> None:
    names = {model.name for model in client.models.list()}
    assert {EMBEDDER, PAINTER} <= names
    schema = client.models.get(IMAGE_REF).latest_version.openapi_schema
    assert "prompt" in schema["components"]["schemas"]["Input"]["properties"]
    assert client.deployments.get(TEXT_REF).name == EMBEDDER


@check
def account_hardware_and_deployments() -> None:
    assert client.accounts.current().username
    assert client.hardware.list()
    assert EMBEDDER in {deployment.name for deployment in client.deployments.list()}


@check
def wrong_input_names_the_field() -> None:
    with raises(ReplicateError) as caught:
        client.run(IMAGE_REF, input={"seed": 1})
    assert caught.error.status == 422
    assert "input.prompt" in (caught.error.detail or "")


@check
def unknown_model_and_unknown_prediction() -> None:
    with raises(ReplicateError) as caught:
        client.run("any/no-such-model", input={"text": "a"})
    assert caught.error.status == 404
    with raises(ReplicateError) as caught:
        client.predictions.get("no-such-prediction")
    assert caught.error.status == 404


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    stranger = Client(api_token=WRONG_KEY, base_url=URL)
    with raises(ReplicateError) as caught:
        stranger.run(TEXT_REF, input={"text": "a"})
    assert caught.error.status == 401


@check
async def async_runs_at_once() -> None:
    texts = fresh(8)
    asking = (client.async_run(TEXT_REF, input={"text": text}) for text in texts)
    assert_same(await asyncio.gather(*asking), vectors(texts))
    created = await client.models.predictions.async_create(TEXT_REF, input={"text": texts[0]})
    assert [event.event.value async for event in created.async_stream()][-1] == "done"


main()
