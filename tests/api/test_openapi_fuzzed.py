"""The OpenAPI document covers every response to any request: schemathesis sends requests, the same
ones each time.

Its phases: the document's examples, each schema's bounds, random requests, and requests built from
earlier responses.
"""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from infra import bigquery as tables
from tests.api.harness import running_api, settings_for
from tests.keys import key_for, keys_url, stored
from tests.limits import PATIENCE

pytestmark = [pytest.mark.slow(about_s=95), pytest.mark.anyio]
ROOT = Path(__file__).parents[2]
CONFIG = "tests/api/openapi/schemathesis.toml"
CASES_OF_A_ROUTE = int(os.environ.get("FUZZ_CASES_OF_A_ROUTE", "5"))
"""Random cases of each kind per route, in addition to boundary cases.

FUZZ_CASES_OF_A_ROUTE=50 tries more, which takes ten times as long.
"""
LIMIT_S = 500 * PATIENCE
HOW_TO_MEND = """
An answer is not as the OpenAPI document says. Is the answer right? Then say so at its route: a
status in the `responses` of its decorator (words for a new one: _DESCRIPTIONS in
api/http/openapi.py), a header in api/http/openapi.py, a field of a body or reply in
api/schemas.
"""


async def test_answers_are_as_documented(
    tmp_path: Path, redis_url: str, bigquery_endpoint: str
) -> None:
    secret = "whsec_" + "A" * 43 + "="
    settings = settings_for(
        tmp_path,
        redis_url=redis_url,
        secret="s",
        keys_url=keys_url(tmp_path, keys=[stored("k", "t", scopes=("all", "admin"))]),
        webhook_secrets=secret,
        bigquery_endpoint=bigquery_endpoint,
        project="fuzzed",
    )
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": bigquery_endpoint},
    )
    with client:
        tables.create(client, settings.dataset)
    async with running_api(settings) as api:
        # The document's own bounds are tested here, not this instance's load.
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "--no-color",
            "--config-file",
            CONFIG,
            "run",
        ]
        command += [f"{api.url}/openapi.json", "--header", f"Authorization: Bearer {key_for('k')}"]
        command += ["--generation-deterministic", "--max-examples", str(CASES_OF_A_ROUTE)]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, output.decode(errors="replace") + HOW_TO_MEND
