"""The clients in tests/clients against these tests' stack, which has keys.

Clients pinned with our own tools always run. The others run if `make clients` has installed them.
"""

import sys

import pytest

from infra.local.stack import Stack
from tests.clients.clients import CLIENTS, Client
from tests.clients.environments import command_of, is_ready, module_of
from tests.clients.running import Service, run_checks
from tests.end_to_end.conftest import EMBEDDER, KEY

pytestmark = pytest.mark.slow(about_s=100)

PINNED_WITH_OUR_TOOLS = ("openai-3", "replicate")
PAINTER = "stable-diffusion-tiny"


@pytest.mark.parametrize(
    "tried",
    [one for one in CLIENTS if not one.needs_documents],
    ids=lambda tried: tried.name,
)
def test_no_check_fails(stack: Stack, tried: Client) -> None:
    if tried.name in PINNED_WITH_OUR_TOOLS:
        command = [sys.executable, *module_of(tried)]
    elif is_ready(tried):
        command = command_of(tried)
    else:
        pytest.skip(f"{tried.name} is not installed: `make clients` does it")
    settings = stack.settings
    service = Service(
        stack.api_url,
        KEY,
        EMBEDDER,
        PAINTER,
        bigquery=settings.bigquery_endpoint,
        pubsub=settings.pubsub_endpoint,
    )
    outcomes, _ = run_checks(command, service)
    assert [one for one in outcomes if one.outcome == "failed"] == []
    # When keys are required, only checks that need the network may be skipped.
    skipped = {one.check for one in outcomes if one.outcome == "skipped"}
    assert skipped <= {"token ids are refused with a reason"}
