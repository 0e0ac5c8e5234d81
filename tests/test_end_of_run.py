"""A test run ends without messages from libraries, whether it passes or fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import START_LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TESTS = """
import duckdb
from shared.process.gc_tuning import settle_heap

def test_keeps_a_connection_after_a_heap_was_settled():
    connection = duckdb.connect()
    settle_heap()
    assert connection and PASSES
"""


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("passes", [True, False])
def test_no_leak_is_reported(tmp_path: Path, passes: bool, workers: str) -> None:
    tests = TESTS.replace("PASSES", str(passes))
    (tmp_path / "test_one.py").write_text(tests)
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "-n", workers]
    configured = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *configured, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    output = done.stdout + done.stderr
    assert f"1 {'passed' if passes else 'failed'}" in output
    assert "leak" not in output
