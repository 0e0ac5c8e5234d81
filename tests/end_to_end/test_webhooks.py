"""Webhooks through the whole pipeline, verified by Replicate's client: notifications to a caller
that does not poll.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from replicate.client import Client
from replicate.webhook import Webhooks

from infra.local.stack import Stack
from tests.end_to_end.conftest import KEY
from tests.end_to_end.rows import eventually
from tests.end_to_end.told import Told
from tests.kept_spans import new_trace
from tests.otlp import Collector

pytestmark = pytest.mark.slow

PAINTER = "stable-diffusion-tiny"


@pytest.fixture
def replicating(stack: Stack) -> Iterator[Any]:
    made = Client(api_token=KEY, base_url=stack.api_url)
    yield made
    made._client.close()


def test_webhook_continues_the_trace_of_its_prediction(
    stack: Stack, collector: Collector, told: Told, text: str
) -> None:
    caller = new_trace()
    body = {
        "version": PAINTER,
        "input": {"prompt": text, "width": 64, "height": 64, "num_inference_steps": 2},
        "webhook": told.url,
        "webhook_events_filter": ["completed"],
    }
    headers = caller.attributes() | {"authorization": f"Bearer {KEY}"}
    created = httpx.post(f"{stack.api_url}/v1/predictions", json=body, headers=headers)
    assert created.status_code == 201, created.text
    # No caller is waiting for it, so there is no reply.
    stages = {"receive", "publish", "queue", "batch", "infer", "webhook"}
    spans = collector.stages(caller.trace_id, stages)
    webhook, publish = spans["webhook"], spans["publish"]
    assert publish.parent_id == spans["receive"].span_id
    assert webhook.parent_id == publish.span_id
    assert (webhook.kind, webhook.attributes["penstock.webhook.end"]) == ("client", "delivered")
    assert webhook.resource["service.name"] == "penstock-functions"
    ((delivered, _),) = told.deliveries
    assert delivered["traceparent"] == f"00-{caller.trace_id}-{webhook.span_id}-01"
    logged = stack.processes["functions"].log_path.read_text()
    (line,) = [line for line in logged.splitlines() if f"traces/{caller.trace_id}" in line]
    assert json.loads(line)["logging.googleapis.com/trace_sampled"] is True


def test_webhook_tells_what_get_tells(replicating: Any, told: Told, text: str) -> None:
    created = replicating.predictions.create(
        version=PAINTER,
        input={"prompt": text, "width": 256, "height": 256, "num_inference_steps": 4},
        webhook=told.url,
        webhook_events_filter=["start", "completed"],
    )
    eventually(lambda: len(told.deliveries) == 2)
    assert told.statuses()[-1] == "succeeded"
    secret = replicating.webhooks.default.secret()
    for headers, body in told.deliveries:
        Webhooks.validate(headers=headers, body=body, secret=secret)
    ended = json.loads(told.deliveries[-1][1])
    created.reload()
    assert {name: ended[name] for name in ("id", "status", "input", "metrics", "completed_at")} == {
        name: getattr(created, name)
        for name in ("id", "status", "input", "metrics", "completed_at")
    }
    (image,) = ended["output"]
    assert image.startswith("data:image/png") or httpx.get(image).content.startswith(b"\x89PNG")
