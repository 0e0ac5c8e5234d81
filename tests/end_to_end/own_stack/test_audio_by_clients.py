"""OpenAI's audio endpoints through the whole pipeline, called with OpenAI's clients for Python and
Node, and the same models' predictions with Replicate's clients.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from replicate.client import Client
from replicate.webhook import Webhooks

from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.clients.audio_classes import FLOW, write_audio, write_audio_classes, write_steps
from tests.clients.clients import client_of
from tests.clients.environments import command_of, is_ready, module_of
from tests.clients.running import Service, run_checks
from tests.end_to_end.told import receiver
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=60)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A stack that serves all classes with one worker."""
    folder = tmp_path_factory.mktemp("stack")
    models = folder / "models.yaml"
    classes = write_audio_classes(folder / "classes") + write_steps(folder / "steps")
    workers = [{"name": "classes", "models": [entry["name"] for entry in classes]}]
    models.write_text(yaml.safe_dump({"models": classes, "flows": [FLOW], "workers": workers}))
    refresh_interfaces(models, lambda line: None)
    settings = {
        "PENSTOCK_KEYS_URL": keys_url(folder, default="default"),
        "PENSTOCK_MODELS_FILE": str(models),
        "PENSTOCK_PROCESSES": "1",
    }
    with Stack(folder, ports=Ports.free(1), settings=settings) as stack:
        audio = write_audio(folder / "audio")
        yield Service(stack.api_url, key_for("default"), embedder="", painter="", audio=audio)


@pytest.mark.parametrize("name", ["openai-3", "openai-node-6", "openai-node-7"])
def test_each_form_by_openais_clients(service: Service, name: str) -> None:
    client = client_of(name).with_classes
    if client.language == "python":
        command = [sys.executable, *module_of(client)]
    elif shutil.which("node") is None or not is_ready(client):
        pytest.skip(f"{name} is not installed: `make clients` does it")
    else:
        command = command_of(client)
    outcomes, _ = run_checks(command, service)
    assert [one for one in outcomes if one.outcome != "passed"] == []
    assert len(outcomes) >= 8


def test_predictions_of_them_by_replicates_client(service: Service) -> None:
    client: Any = Client(api_token=service.key, base_url=service.url)
    try:
        predicted(client, service)
    finally:
        client._client.close()


def predicted(client: Any, service: Service) -> None:
    given = json.loads(Path(service.audio).read_text())
    said = " ".join(one.strip() for one in given["segments"])
    with receiver() as told, Path(given["recording"]).open("rb") as file:
        created = client.predictions.create(
            version=given["hearer"],
            input={"file": file, "word_timestamps": True},
            webhook=told.url,
            webhook_events_filter=["completed"],
        )
        elements = [event.data for event in created.stream() if event.event.value == "output"]
        until_s = time.monotonic() + WAIT_LIMIT_S
        while not told.deliveries:
            assert time.monotonic() < until_s
            time.sleep(0.05)
    ((headers, body),) = told.deliveries
    assert " ".join(json.loads(one)["text"].strip() for one in elements) == said
    secret = client.webhooks.default.secret()
    Webhooks.validate(headers=headers, body=body, secret=secret)
    prediction = json.loads(body)
    assert (prediction["id"], prediction["status"]) == (created.id, "succeeded")
    assert [one["text"].strip() for one in prediction["output"]] == [
        one.strip() for one in given["segments"]
    ]
    assert sum(len(one["words"]) for one in prediction["output"]) == given["words"]
    assert prediction["metrics"]["cost_usd"] == pytest.approx(0.001 * given["seconds"])
    (sound,) = client.run(f"any/{given['speaker']}", input={"input": given["said"]})
    text = "".join(word * 20_000 for word in given["said"].split())
    assert httpx.get(str(getattr(sound, "url", sound))).text == text
    parts = client.run(f"any/{given['speaker']}", input={"input": given["said"], "stream": True})
    assert len(list(parts)) == len(given["said"].split())


def test_a_flow_writes_down_windows(service: Service) -> None:
    given = json.loads(Path(service.audio).read_text())
    path, url = Path(given["recording"]), f"{service.url}/v1"
    with openai.OpenAI(base_url=url, api_key=service.key, max_retries=0) as client:
        create: Any = client.audio.transcriptions.create
        whole = create(model=given["hearer"], file=path, response_format="verbose_json")
        flow = create(model=FLOW["name"], file=path, response_format="verbose_json")
        assert (flow.text, flow.duration) == (whole.text, whole.duration)
        assert [(one.start, one.end, one.text) for one in flow.segments] == [
            (one.start, one.end, one.text) for one in whole.segments
        ]
        words = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
        timed = create(model=FLOW["name"], file=path, **words)
        assert [one.text for one in timed.segments] == [one.text for one in whole.segments]
        assert len(timed.words) == given["words"]
        assert timed.words[-1].start > timed.segments[-1].start
        assert flow.usage.seconds == given["seconds"]
        *deltas, done = create(model=FLOW["name"], file=path, stream=True)
        assert [one.delta for one in deltas] == given["segments"]
        assert (done.text, done.usage.seconds) == (whole.text, given["seconds"])
        srt = create(model=FLOW["name"], file=path, response_format="srt")
        assert srt == create(model=given["hearer"], file=path, response_format="srt")
        with pytest.raises(openai.BadRequestError, match="temperature: is not supported by"):
            create(model=FLOW["name"], file=path, temperature=0.5)
        with pytest.raises(openai.APIStatusError, match="not a recording"):
            create(model=FLOW["name"], file=("a.wav", b"noise"))
        silence = create(model=FLOW["name"], file=("a.wav", b"\n"))
        assert (silence.text, silence.usage.seconds) == ("", 2)


def test_a_stream_of_a_flow_goes_on_behind_an_id(service: Service) -> None:
    given = json.loads(Path(service.audio).read_text())
    form = {"model": FLOW["name"], "stream": "true"}
    keyed = {"authorization": f"Bearer {service.key}", "idempotency-key": "windows"}
    url = f"{service.url}/v1/audio/transcriptions"

    def blocks(**headers: str) -> list[list[str]]:
        """Each event's lines, without the comments that keep a slow stream alive."""
        files = {"file": ("a.wav", Path(given["recording"]).read_bytes())}
        answer = httpx.post(
            url, data=form, files=files, headers=keyed | headers, timeout=WAIT_LIMIT_S
        )
        assert answer.status_code == 200, answer.text
        events = [event.splitlines() for event in answer.text.split("\n\n") if "data:" in event]
        return [[line for line in event if not line.startswith(":")] for event in events]

    first, *others = blocks()
    (number,) = [line[4:] for line in first if line.startswith("id: ")]
    assert blocks(**{"last-event-id": number}) == others
