"""Tests that share resources that take long to start run on one pytest-xdist worker."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.groups import (
    BROKERS,
    OF_BROKERS,
    QUICK_S,
    SHARING,
    SLOW_S,
    about_s,
    group_of,
    longest_first,
)
from tests.limits import START_LIMIT_S

pytest_plugins = "pytester"

ROOT = Path(__file__).parents[1]
FILES = ("tests/shared/test_days.py", "tests/shared/test_webhooks.py")


@pytest.mark.slow
def test_a_file_stays_on_one_worker() -> None:
    options = re.search(r"--dist loadfile [a-z-]+", (ROOT / "Makefile").read_text())
    assert options, "`make test` gives a whole file to each of its workers"
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", *options[0].split(), *FILES]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\] .*PASSED ([^:]+)::", done.stdout, re.MULTILINE):
        workers[file].add(worker)
    assert sorted(workers) == sorted(FILES), done.stdout
    assert [len(found) for found in workers.values()] == [1, 1], done.stdout


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/end_to_end/test_load.py::test_a[b::c]", "tests/end_to_end/"),
        (
            "tests/workers/models/generation/test_llama.py::test_a",
            "tests/workers/models/generation/",
        ),
        (
            "tests/workers/models/custom/test_forms.py::test_a",
            "tests/workers/models/custom/test_forms.py",
        ),
        (
            "tests/end_to_end/own_stack/test_canary.py::test_a",
            "tests/end_to_end/own_stack/test_canary.py",
        ),
        ("tests/shared/test_brokers.py::test_a[rabbitmq]", BROKERS),
        ("tests/shared/test_days.py::test_a[x/y]", "tests/shared/test_days.py"),
    ],
)
def test_files_that_share_are_one_group(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_what_shares_is_there() -> None:
    assert not [folder for folder in SHARING if not list((ROOT / folder).glob("test_*.py"))]
    assert not [file for file in OF_BROKERS if not (ROOT / file).is_file()]


def test_what_takes_longest_begins_first(pytester: pytest.Pytester) -> None:
    texts = {
        "test_a": "def test_1(): pass\ndef test_2(): pass",
        "test_b": "@slow(about_s=30)\ndef test_1(): pass\ndef test_2(): pass",
        "test_c": "pytestmark = slow\ndef test_1(): pass",
        "test_d": "@pytest.mark.many(about_s=60)\ndef test_1(): pass",
        "test_e": "pytestmark = slow(about_s=40)\ndef test_1(): pass\ndef test_2(): pass",
    }
    head = "import pytest\nslow = pytest.mark.slow\n"
    pytester.makepyfile(**{name: head + text for name, text in texts.items()})
    # The inner run doesn't read our settings, which would keep this plugin from loading.
    items, _ = pytester.inline_genitems("-p", "no:valkey")
    assert [about_s([item]) for item in items] == [
        *(QUICK_S, QUICK_S),
        *(30, QUICK_S),
        SLOW_S,
        60,
        *(40, 40),
    ]
    assert about_s(items) == 30 + 60 + 40 + SLOW_S + 3 * QUICK_S, "a file's mark counts once"
    names = [item.nodeid.replace(".py::test_", " ") for item in longest_first(items)]
    expected = ["d 1", "e 1", "e 2", "b 1", "b 2", "c 1", "a 1", "a 2"]
    assert names == [f"test_{name}" for name in expected]
