"""No tenant can shut out the others, no matter how much it sends."""

import asyncio
from pathlib import Path

import httpx
import pytest

from shared.models.catalog import Catalog
from shared.models.tasks.embedding import TextInput
from tests.api.dispatcher_harness import running_dispatcher
from tests.api.harness import TEXT_MODEL, running_api, settings_for
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

CONNECTIONS, TEXTS = 20, 32


def texts_of(tenant: str, connection: int, count: int) -> dict[str, object]:
    return {
        "model": TEXT_MODEL.name,
        "input": [f"{tenant} {connection} {number}" for number in range(count)],
    }


async def test_tenant_that_fills_an_instance_leaves_room_for_another(tmp_path: Path) -> None:
    """The worker does not reply until it is allowed to, so every rejection is caused by requests in
    flight.
    """
    settings = settings_for(tmp_path, keys_url=keys_url(tmp_path, b="busy", q="quiet"))
    limits = httpx.Limits(max_connections=None)
    small = Catalog((TEXT_MODEL.model_copy(update={"max_in_flight": 512}),))
    async with (
        running_api(settings, catalog=small) as api,
        httpx.AsyncClient(base_url=f"{api.url}/v1", limits=limits, timeout=WAIT_LIMIT_S) as http,
    ):
        api.worker.go.clear()

        def ask(tenant: str, connection: int, count: int) -> asyncio.Task[httpx.Response]:
            body, headers = (
                texts_of(tenant, connection, count),
                bearer(tenant[0]),
            )
            return asyncio.create_task(http.post("/embeddings", json=body, headers=headers))

        busy = [ask("busy", connection, TEXTS) for connection in range(CONNECTIONS)]
        done, _ = await asyncio.wait(
            busy, timeout=WAIT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        refused = {one.result().status_code for one in done}
        assert refused == {429}, "its own share is full, and nobody is answered"
        taken = len(api.worker.jobs)
        quiet = ask("quiet", 0, 1)
        arrived = asyncio.create_task(api.worker.until_taken(taken + 1))
        await asyncio.wait({quiet, arrived}, return_when=asyncio.FIRST_COMPLETED)
        api.worker.go.set()
        answers = await asyncio.gather(quiet, *busy)
        arrived.cancel()
        assert answers[0].status_code == 200, answers[0].text


async def test_jobs_carry_the_weight_of_their_tenant(tmp_path: Path) -> None:
    async with running_dispatcher(tmp_path) as harness:
        await asyncio.gather(harness.ask("a", weight=4.0), harness.ask("b"))
        weights = {str(job.body.items[0].input): job.envelope.weight for job in harness.worker.jobs}
        assert weights == {str(TextInput("a")): 4.0, str(TextInput("b")): 1.0}
