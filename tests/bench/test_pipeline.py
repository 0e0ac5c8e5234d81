"""Benchmarks run as an ordinary user, to whom most of the pipeline's processes deny inspection."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=60)

TEXTS = 200
MEASURE = f"""
import json
import psutil
from bench.peers.tree import Tree
from bench.pipeline import running

with running({{"backend": "torch"}}, is_alone=True) as pipeline, pipeline.another_api() as another:
    _, spent_s = pipeline.spend(lambda: pipeline.ask(pipeline.texts.short({TEXTS}), 16))
    memory_bytes = Tree([psutil.Process()]).memory_bytes()
    print(json.dumps([spent_s, another.cpu_s(), another.rss_bytes(), memory_bytes]))
"""
WITHOUT_CAPABILITIES = """
import ctypes, os, sys
PR_CAPBSET_DROP = 24
# Root may inspect all processes because of its capabilities. A user without any can't drop them.
for number in range(64):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def test_an_ordinary_user_can_measure_all_parts() -> None:
    command = [sys.executable, "-c", WITHOUT_CAPABILITIES, MEASURE]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=3 * WAIT_LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    spent_s, another_cpu_s, another_rss_bytes, memory_bytes = json.loads(done.stdout)
    assert min(spent_s[name] for name in ("API", "broker", "worker, I/O", "worker, model")) > 0
    assert another_cpu_s > 0
    assert 0 < another_rss_bytes < memory_bytes
