"""Clients are identified by their User-Agent; rows store only the kind of client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.request_options import FAMILIES, family_of, read_options
from shared.messages import RequestFacts


@pytest.mark.parametrize(
    ("sent", "family"),
    [
        ("OpenAI/Python 1.109.1", "openai-python"),
        ("AsyncOpenAI/Python 1.109.1", "openai-python"),
        ("OpenAI/JS 5.23.2", "openai-node"),
        ("OpenAI/Go 3.1.0", "openai-other"),
        ("langchainjs-openai/1.0.0 (node/v22; linux; x64) OpenAI/JS 5.0", "langchain"),
        ("ai/5.0.1 ai-sdk/openai-compatible/1.0.2 runtime/node.js/22", "ai-sdk"),
        ("replicate-python/1.0.7", "replicate"),
        ("replicate-javascript/1.0.1", "replicate"),
        ("curl/8.5.0", "curl"),
        ("python-requests/2.32.3", "python-requests"),
        ("Python/3.11 aiohttp/3.12.15", "python-aiohttp"),
        ("Go-http-client/2.0", "go"),
        ("node", "node"),
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", "browser"),
        ("acme-secret-project/1", "other"),
        ("  ", ""),
    ],
)
def test_known_clients(sent: str, family: str) -> None:
    assert family_of(sent) == family


@given(st.binary(max_size=600))
def test_nobody_writes_into_the_rows(header: bytes) -> None:
    facts = RequestFacts(request_id="req_1", tenant="t", received_at_s=0.0)
    read_options([(b"user-agent", header), (b"user-agent", b"curl/8")], facts)
    assert facts.user_agent_family in FAMILIES | {""}
