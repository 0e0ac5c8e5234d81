"""Rows and reports from the whole pipeline: every request has its row exactly once, and the report
adds up the rows.
"""

import asyncio

import openai
import pytest

from infra.local.stack import Stack
from infra.reports.runs import run_report
from shared.models.catalog_file import read_catalog
from shared.money.charge import list_price_usd, price_of
from tests.end_to_end.conftest import EMBEDDER, KEY, REPORTING_KEY
from tests.end_to_end.rows import Rows

pytestmark = pytest.mark.slow(about_s=20)

REQUESTS = 300
IN_FLIGHT = 64


@pytest.mark.anyio
async def test_each_of_many_requests_has_one_row(stack: Stack, rows: Rows, text: str) -> None:
    in_flight = asyncio.Semaphore(IN_FLIGHT)
    async with openai.AsyncOpenAI(
        base_url=f"{stack.api_url}/v1", api_key=KEY, max_retries=0
    ) as client:

        async def ask(number: int) -> str:
            async with in_flight:
                answer = await client.embeddings.with_raw_response.create(
                    model=EMBEDDER, input=f"{text} {number}"
                )
            return answer.headers["x-request-id"]

        request_ids = await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    found = await asyncio.to_thread(rows.of, request_ids)
    assert sorted(row["request_id"] for row in found) == sorted(request_ids)
    for row in found:
        assert (row["status"], row["cache"], row["attempt"]) == ("succeeded", "miss", 1)
        times = [
            row[f"{step}_at"]
            for step in ("received", "published", "pulled", "started", "finished", "replied")
        ]
        assert times == sorted(times)


def test_usage_report_adds_up(stack: Stack, client: openai.OpenAI, rows: Rows, text: str) -> None:
    """The tenant requests three texts, twice, and two images."""
    asking = client.with_options(api_key=REPORTING_KEY)
    texts = [f"{text} {number}" for number in range(3)]
    embedded = [
        asking.embeddings.with_raw_response.create(model=EMBEDDER, input=texts) for _ in range(2)
    ]
    drawn = asking.images.with_raw_response.generate(prompt=text, n=2, size="64x64")
    answers = [*(answer.headers for answer in embedded), drawn.headers]
    by_header = [float(headers["x-penstock-cost-usd"]) for headers in answers]
    request_ids = [
        *(answer.headers["x-request-id"] for answer in embedded),
        drawn.headers["x-request-id"],
    ]
    rows.of(request_ids, count=8)

    heads, lines = run_report(stack.settings, "usage", days=1)
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    usage = {line["model"]: line for line in found if line["tenant"] == "reporting"}
    catalog = read_catalog(stack.settings.models_file)
    tokens, pixel_steps = embedded[0].parse().usage.total_tokens, 2 * 64 * 64 * 20

    texts_line, images_line = usage[EMBEDDER], usage[catalog.default("image").name]
    assert (texts_line["items"], texts_line["requests"], texts_line["succeeded"]) == (6, 2, 6)
    assert texts_line["hit_percent"] == 50.0
    assert texts_line["cost_usd"] == pytest.approx(
        list_price_usd(price_of(catalog.find(EMBEDDER), 0), tokens, None), abs=1e-6
    )
    assert (images_line["items"], images_line["requests"], images_line["hit_percent"]) == (
        2,
        1,
        0.0,
    )
    assert images_line["pixel_steps"] == pixel_steps
    assert images_line["cost_usd"] == pytest.approx(
        list_price_usd(price_of(catalog.default("image"), 0), None, pixel_steps), abs=1e-6
    )
    assert images_line["device_s"] > 0
    assert sum(by_header) == pytest.approx(
        texts_line["cost_usd"] + images_line["cost_usd"], rel=1e-12
    )
