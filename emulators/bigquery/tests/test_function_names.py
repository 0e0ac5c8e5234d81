"""Every function in BigQuery's reference is either supported or rejected by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigquery_emulator.errors import ServiceError, UnsupportedError
from bigquery_emulator.googlesql.analysis.analyzer import Analyzer, ParameterTypes

# From https://cloud.google.com/bigquery/docs/reference/standard-sql/functions-all
NAMES = (Path(__file__).parent / "bigquery_functions.txt").read_text().split()


@pytest.fixture(scope="module")
def analyzer() -> Analyzer:
    return Analyzer()


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_bigquery_is_known_or_refused_by_its_name(
    analyzer: Analyzer, name: str
) -> None:
    error: ServiceError | None = None
    try:
        analyzer.analyze(f"SELECT {name}()", [], ParameterTypes())
    except ServiceError as found:
        error = found
    if isinstance(error, UnsupportedError):
        assert error.message == f"Function {name}: not supported by the embedded BigQuery"
    elif error is not None:
        # The function is recognized, but its arguments or position are wrong.
        assert "not found" not in error.message.lower()


@pytest.mark.parametrize("name", ["NO_SUCH", "MLX.PREDICT", "SEARCHES", "NULLIFZERO"])
def test_a_function_that_bigquery_has_not_is_not_found(analyzer: Analyzer, name: str) -> None:
    with pytest.raises(ServiceError, match=f"Function not found: {name}"):
        analyzer.analyze(f"SELECT {name}(1)", [], ParameterTypes())
