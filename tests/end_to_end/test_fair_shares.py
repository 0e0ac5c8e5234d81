"""Through the whole pipeline, a tenant with a lot of work does not delay another tenant."""

import asyncio

import openai
import pytest

from infra.local.stack import Stack
from tests.end_to_end.conftest import BUSY_KEY, EMBEDDER, KEY
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

REQUESTS, TEXTS, WORDS = 8, 32, 100
PATIENT = {"x-penstock-deadline-ms": "300000"}


@pytest.mark.anyio
async def test_text_is_not_computed_after_all_that_another_tenant_sent_before(
    stack: Stack, text: str
) -> None:
    """In order of arrival, the text would be the last or among the last."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.api_url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_LIMIT_S
    ) as quiet:
        busy = quiet.with_options(api_key=BUSY_KEY)

        async def ask(number: int) -> None:
            texts = [f"{text} {number} {place}" + " word" * WORDS for place in range(TEXTS)]
            await busy.embeddings.create(model=EMBEDDER, input=texts, extra_headers=PATIENT)

        asked = [asyncio.create_task(ask(number)) for number in range(REQUESTS)]
        await asyncio.wait(asked, timeout=WAIT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        await quiet.embeddings.create(model=EMBEDDER, input=text, extra_headers=PATIENT)
        waiting = sum(not one.done() for one in asked)
        await asyncio.gather(*asked)
    assert waiting >= 3
