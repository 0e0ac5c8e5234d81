from pathlib import Path

import pytest

from tests.infra.test_cli import penstock

pytestmark = pytest.mark.slow


def test_bench_takes_the_words_of_the_benchmarks() -> None:
    assert "--check" in penstock("bench", "--help").stdout


def test_unknown_benchmark_is_refused() -> None:
    reported = penstock("bench", "nothing")
    assert reported.returncode == 2
    assert "no such benchmark: nothing" in reported.stderr


def test_bench_without_a_checkout_says_so(tmp_path: Path) -> None:
    reported = penstock("bench", cwd=tmp_path)
    assert reported.returncode == 1
    assert "this folder has no benchmarks" in reported.stderr
