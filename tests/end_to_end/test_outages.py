"""Parts that die, hang or fail while requests arrive: each request gets one clear response and one
row, and the pipeline recovers.
"""

import asyncio
import base64
import io
import re
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import openai
import pytest
from PIL import Image

from infra.local.process import Process, answers, free_port, listens
from infra.local.stack import Stack
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.transport import SubscriptionSettings
from shared.errors import Unavailable
from tests.end_to_end.conftest import EMBEDDER
from tests.end_to_end.rows import Rows, eventually
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=8)

WORKER = f"worker-{EMBEDDER}"


def ask(client: openai.OpenAI, text: str, deadline_ms: int | None = None) -> tuple[int, str, str]:
    """Status, request id and Retry-After from the single response to an embedding request."""
    headers = {} if deadline_ms is None else {"X-Penstock-Deadline-Ms": str(deadline_ms)}
    try:
        given = client.embeddings.with_raw_response.create(
            model=EMBEDDER, input=text, extra_headers=headers
        )
    except openai.APIStatusError as error:
        given = error.response  # type: ignore[assignment]
    return given.status_code, given.headers["x-request-id"], given.headers.get("retry-after", "")


def ask_all(client: openai.OpenAI, texts: Sequence[str]) -> list[str]:
    """The ids of concurrent requests, one for each text; each request must get a vector."""
    with ThreadPoolExecutor(16) as threads:
        given = list(threads.map(partial(ask, client), texts))
    assert [status for status, _, _ in given] == [200] * len(texts)
    return [request_id for _, request_id, _ in given]


def assert_one_row_each(rows: Rows, request_ids: Sequence[str]) -> None:
    found = rows.of(request_ids)
    assert sorted({row["row_id"] for row in found}) == sorted(
        f"{request_id}:0" for request_id in request_ids
    )


def metric(port: int, name: str) -> float:
    """A sample from a process's metrics; 0 if nothing has been counted yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_LIMIT_S) as answer:
        found = re.findall(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[0]) if found else 0.0


@contextmanager
def replaced_by_a_file(folder: Path) -> Iterator[None]:
    """Replaces the folder with a file, so that no user, not even root, can read or write anything
    in it.
    """
    kept = folder.with_name(f"{folder.name}.kept")
    was_there = folder.exists()
    if was_there:
        folder.rename(kept)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("no folder")
    try:
        yield
    finally:
        folder.unlink()
        if was_there:
            kept.rename(folder)


def test_redis_hangs(stack: Stack, client: openai.OpenAI, rows: Rows, text: str) -> None:
    stack.processes["redis"].pause()
    try:
        request_ids = ask_all(client, [f"{text} {number}" for number in range(20)])
        assert eventually(lambda: metric(stack.ports.metrics, "penstock_cache_redis_up") == 0)
        request_ids += ask_all(client, [f"{text} later {number}" for number in range(20)])
    finally:
        stack.processes["redis"].resume()
    assert eventually(lambda: metric(stack.ports.metrics, "penstock_cache_redis_up") == 1)
    assert_one_row_each(rows, request_ids)


def test_bigquery_hangs(stack: Stack, client: openai.OpenAI, rows: Rows, text: str) -> None:
    stack.processes["bigquery"].pause()
    try:
        request_ids = ask_all(client, [f"{text} {number % 25}" for number in range(50)])
        assert metric(stack.ports.health[0], "penstock_rows_pending") >= 1
    finally:
        stack.processes["bigquery"].resume()
    assert_one_row_each(rows, request_ids)


def test_bigquery_is_down_and_all_that_hold_rows_are_killed(
    stack: Stack, client: openai.OpenAI, rows: Rows, text: str
) -> None:
    """The worker's rows (computed) and the API's (hits) are on disk and survive SIGKILL of both."""
    bigquery, worker, api = (stack.processes[name] for name in ("bigquery", WORKER, "api"))
    bigquery.kill()
    texts = [f"{text} {number}" for number in range(25)]
    request_ids = ask_all(client, texts) + ask_all(client, texts)
    api.kill()
    # The last replies were sent just before their rows; a job whose rows are not written yet is
    # redelivered.
    worker.kill()
    bigquery.start()
    worker.start()
    api.start()
    bigquery.wait_ready(lambda: listens(stack.ports.bigquery), START_LIMIT_S)
    api.wait_ready(lambda: answers(stack.ports.api, "/readyz"), START_LIMIT_S)
    worker.wait_ready(lambda: answers(stack.ports.health[0], "/readyz"), START_LIMIT_S)
    assert_one_row_each(rows, request_ids)
    assert ask(client, f"{text} after")[0] == 200


def test_broker_hangs(stack: Stack, client: openai.OpenAI, rows: Rows, text: str) -> None:
    """Requests that can't wait are rejected and may be retried.

    Requests that can wait succeed once the broker is back.
    """
    stack.processes[stack.broker].pause()
    try:
        with ThreadPoolExecutor(8) as threads:
            patient = [threads.submit(ask, client, f"{text} patient {n}", 25_000) for n in range(4)]
            hasty = [threads.submit(ask, client, f"{text} hasty {n}", 700) for n in range(4)]
            refused = [one.result(WAIT_LIMIT_S) for one in hasty]
            assert not any(one.done() for one in patient)
            stack.processes[stack.broker].resume()
            served = [one.result(WAIT_LIMIT_S) for one in patient]
    finally:
        stack.processes[stack.broker].resume()
    assert {status for status, _, _ in refused} <= {503, 504}
    assert all(retry_after for status, _, retry_after in refused if status == 503)
    assert [status for status, _, _ in served] == [200] * 4
    assert_one_row_each(rows, [request_id for _, request_id, _ in refused + served])


@pytest.mark.anyio
async def test_pubsub_is_killed_and_back(tmp_path: Path) -> None:
    """With a data directory, everything Pub/Sub accepted is delivered, and a waiting publish goes
    through once it is back.
    """
    port, wanted = free_port(), {f"job {number}".encode() for number in range(20)}
    command = [
        sys.executable,
        "-m",
        "pubsub_emulator",
        "--port",
        str(port),
        "--data-dir",
        str(tmp_path / "data"),
    ]
    with Process("pubsub", command, tmp_path) as server:
        await asyncio.to_thread(server.wait_ready, lambda: listens(port), WAIT_LIMIT_S)
        endpoint = f"127.0.0.1:{port}"
        async with (
            PubSubAdmin("outages", endpoint) as admin,
            PubSubTransport("outages", endpoint) as transport,
        ):
            await admin.ensure_topic("jobs")
            await admin.ensure_subscription("jobs", SubscriptionSettings("jobs"))
            accepted = sorted(wanted)[:10]
            await asyncio.gather(*(transport.publish("jobs", data, {}) for data in accepted))
            server.kill()
            waiting = [
                asyncio.create_task(transport.publish("jobs", data, {}, timeout_s=WAIT_LIMIT_S))
                for data in wanted - set(accepted)
            ]
            with pytest.raises(Unavailable):
                await transport.publish("jobs", b"in a hurry", {}, timeout_s=0.3)
            server.start()
            await asyncio.gather(*waiting)
            got: set[bytes] = set()
            async with (
                asyncio.timeout(WAIT_LIMIT_S),
                transport.subscribe("jobs", max_messages=10) as subscription,
            ):
                async for message in subscription:
                    subscription.ack(message)
                    got.add(message.data)
                    if wanted <= got:
                        break


def test_objects_cannot_be_stored_by_the_api(
    stack: Stack, client: openai.OpenAI, rows: Rows, text: str
) -> None:
    """A source image over the inline limit needs the store, but texts don't."""
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    png = io.BytesIO()
    Image.fromarray(noise).save(png, "PNG")
    edit = partial(
        client.images.with_raw_response.edit,
        model="stable-diffusion-tiny",
        image=("source.png", png.getvalue(), "image/png"),
        prompt=text,
        size="256x256",
        extra_body={"strength": 0.1},
    )
    with replaced_by_a_file(stack.state_dir / "objects" / "inputs"):
        with pytest.raises(openai.InternalServerError) as caught:
            edit()
        assert caught.value.status_code == 503
        assert caught.value.code == "unavailable"
        assert caught.value.response.headers["retry-after"]
        assert ask(client, text)[0] == 200
    answer = edit()
    assert len(answer.parse().data or []) == 1
    found = rows.of([caught.value.response.headers["x-request-id"], answer.headers["x-request-id"]])
    assert [row["status"] for row in found] == ["failed", "succeeded"]


def test_objects_cannot_be_stored_by_a_worker(
    stack: Stack, client: openai.OpenAI, rows: Rows, text: str
) -> None:
    """The worker holds a result over the inline limit until the store accepts it; its caller just
    waits longer.
    """
    port = stack.ports.health[1]
    refusals = 'penstock_objects_errors_total{operation="put"}'
    before = metric(port, refusals)
    draw = partial(
        client.images.with_raw_response.generate,
        prompt=text,
        size="384x384",
        extra_body={"num_inference_steps": 2},
    )
    with ThreadPoolExecutor(1) as threads:
        with replaced_by_a_file(stack.state_dir / "objects" / "results"):
            drawing = threads.submit(draw)
            eventually(lambda: metric(port, refusals) > before, WAIT_LIMIT_S)
        answer = drawing.result(WAIT_LIMIT_S)
    assert len(base64.b64decode((answer.parse().data or [])[0].b64_json or "")) > 48 * 1024
    (row,) = rows.of([answer.headers["x-request-id"]])
    assert (row["status"], row["attempt"]) == ("succeeded", 1), "drawn once"


def test_disk_takes_no_rows(stack: Stack, client: openai.OpenAI, rows: Rows, text: str) -> None:
    """Jobs are acked once BigQuery has their rows; responses do not wait for that."""
    spool_dir, port = stack.state_dir / "spool" / WORKER, stack.ports.health[0]
    with replaced_by_a_file(spool_dir):
        number = iter(range(1000))
        eventually(
            lambda: (
                ask_all(client, [f"{text} {next(number)}"])
                and metric(port, "penstock_rows_disk_up") == 0
            ),
            WAIT_LIMIT_S,
        )
        request_ids = ask_all(client, [f"{text} full {n}" for n in range(50)])
        assert_one_row_each(rows, request_ids)
    eventually(
        lambda: (
            ask_all(client, [f"{text} healed {next(number)}"])
            and metric(port, "penstock_rows_disk_up") == 1
        ),
        20,
    )
