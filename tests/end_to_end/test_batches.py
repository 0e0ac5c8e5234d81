"""Batches through the whole pipeline, as OpenAI's client sends them, while parts of the pipeline
are killed.
"""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import uuid4

import numpy as np
import openai
import pytest

from infra.local.process import answers, listens
from infra.local.stack import Stack
from tests.end_to_end.conftest import EMBEDDER, Embed
from tests.end_to_end.rows import Rows, eventually
from tests.end_to_end.told import Told
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=15)

OVER = {"completed", "failed", "expired", "cancelled"}
LINES = 2000
LIMIT_S = 4 * WAIT_LIMIT_S


def created(client: openai.OpenAI, texts: list[str], **given: Any) -> Any:
    """A batch with one line per text."""
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": EMBEDDER, "input": text, "encoding_format": "base64"},
        }
        for number, text in enumerate(texts)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/embeddings",
        completion_window="24h",
        extra_body=given,
    )


def found_lines(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def over(client: openai.OpenAI, batch: Any) -> Any:
    """Returns the batch once it has finished.

    If an API instance was just killed, tries again later.
    """
    try:
        found = client.batches.retrieve(batch.id)
    except openai.APIConnectionError:
        return None
    return found if found.status in OVER else None


def test_batch_is_computed_told_and_charged_by_half(
    client: openai.OpenAI, rows: Rows, told: Told, reference: Embed, text: str
) -> None:
    texts = [f"{text} {number}" for number in range(20)]
    batch = created(client, texts, webhook=told.url, metadata={"of": "a test"})
    done = eventually(lambda: over(client, batch))
    assert (done.status, done.metadata) == ("completed", {"of": "a test"})
    found = found_lines(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"c{number}" for number in range(20)]
    embedding = client.embeddings.create(model=EMBEDDER, input=texts[7]).data[0].embedding
    assert np.dot(np.asarray(embedding), reference(texts[7])) > 0.999
    request_ids = [one["response"]["request_id"] for one in found]
    assert {row["charged_share"] for row in rows.of(request_ids)} == {0.5}
    eventually(lambda: told.deliveries)
    ((headers, body),) = told.deliveries
    assert json.loads(body)["type"] == "batch.completed"
    assert json.loads(body)["data"] == {"id": batch.id}
    assert headers["webhook-id"] == json.loads(body)["id"]


def test_every_line_is_answered_once_while_all_parts_are_killed(
    stack: Stack, client: openai.OpenAI, rows: Rows
) -> None:
    mark = uuid4().hex[:8]
    batch = created(client, [f"{mark}: line {number} of the river" for number in range(LINES)])
    eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    time.sleep(1.0)  # lines are in flight
    worker = f"worker-{EMBEDDER}"
    for name in ("batches", "api", worker, "redis"):
        stack.processes[name].kill()
    for name in ("redis", worker, "api", "batches"):
        stack.processes[name].start()
    ports = stack.ports
    stack.processes["redis"].wait_ready(lambda: listens(ports.redis), START_LIMIT_S)
    stack.processes["api"].wait_ready(lambda: answers(ports.api, "/readyz"), START_LIMIT_S)
    stack.processes[worker].wait_ready(lambda: answers(ports.health[0], "/readyz"), START_LIMIT_S)
    done = eventually(lambda: over(client, batch), LIMIT_S)
    assert done.request_counts.model_dump() == {"completed": LINES, "failed": 0, "total": LINES}
    found = found_lines(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"c{number}" for number in range(LINES)]
    assert {one["response"]["status_code"] for one in found} == {200}
    request_ids = [one["response"]["request_id"] for one in found]
    assert len(set(request_ids)) == LINES
    counted = rows.query(
        "SELECT COUNT(*) AS n, COUNT(DISTINCT row_id) AS ids "
        "FROM `{dataset}.rows_deduplicated` "
        "WHERE received_at > TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 DAY) "
        "AND STARTS_WITH(request_id, @batch) AND status = 'succeeded'",
        batch=batch.id,
    )
    assert counted[0]["n"] == counted[0]["ids"]
