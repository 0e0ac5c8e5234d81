"""Keeps the quick tests quick, and says which tests were skipped for what.

A test is quick unless its file, or the test, has the mark `slow`. A quick one that takes longer
than QUICK_LIMIT_S on a quiet machine fails the run: the fault is named at the end of it. What a
shared fixture takes is not counted, as another test may have paid for it.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from tests.limits import PATIENCE

QUICK_LIMIT_S = 5.0 * PATIENCE
QUICK_EXAMPLES = 15
"""Examples of each property test in the quick tier."""
QUICK, SLOW = "not slow", "slow or hypothesis"
"""The tiers, as `-m` of `make test` and `make test-slow`."""
MAX_NAMED_FILES = 25
"""So many are named at the end of a run."""
_ALL_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)
_TOOK = "took_s"

Timed = Generator[None, Any, Any]
"""What a wrapper of one of pytest's hooks is."""


def examples(usual: int) -> int:
    """How many examples a test of Hypothesis takes that would usually take another number than 100.

    The profile decides how many 100 are: 15 in the quick tier (tests/conftest.py).
    """
    return max(1, usual * settings().max_examples // 100)


@cache
def has_none_of(expression: str, path: Path) -> bool:
    """Whether a file or folder needn't be imported for `-m expression`: those of the other tier.

    A third of the files are slow as a whole, and import torch and other large libraries. Each
    process of a run would.
    """
    if expression not in (QUICK, SLOW):
        return False
    if path.is_dir():
        files = list(path.rglob("test_*.py"))
        return bool(files) and all(has_none_of(expression, file) for file in files)
    if not path.name.startswith("test_"):
        return False
    text = path.read_text()
    if expression == QUICK:
        return _ALL_SLOW.search(text) is not None
    return "mark.slow" not in text and "hypothesis" not in text


class Spent(NamedTuple):
    """What went by, in seconds: of the clock, and of this process's CPU time and its children's.

    The CPU time of a child counts once it has ended and was waited for.
    """

    wall_s: float
    cpu_s: float

    @classmethod
    def so_far(cls) -> Spent:
        """Since some moment in the past; only differences mean anything."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used))

    def since(self, start: Spent) -> Spent:
        """What went by from `start` until this."""
        return Spent(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s)

    def plus(self, more: Spent) -> Spent:
        """Both together."""
        return Spent(self.wall_s + more.wall_s, self.cpu_s + more.cpu_s)


def quiet_s(spent: Spent, load_per_core: float) -> float:
    """About how many seconds it would have taken on a quiet machine.

    CPU time hardly depends on what else runs, but does not show waits. The clock shows them, and
    what else runs too: with `load_per_core` processes per core that want to run, each gets that
    share of the time. A test that waits for a server waits for its share too, so what exceeds one
    process counts twice.
    """
    return max(spent.cpu_s, spent.wall_s / max(1.0, 2 * load_per_core - 1))


def load_per_core() -> float:
    """Returns the load per core in the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _takes_many_examples(item: pytest.Item) -> bool:
    """True for a property test in a run that tries more examples than the quick tier does."""
    is_property = item.get_closest_marker("hypothesis") is not None
    return is_property and settings().max_examples > QUICK_EXAMPLES


class QuickTests:
    """A plugin of pytest that times quick tests, and fails a run if one took too long.

    Workers of pytest-xdist measure; the process that starts them collects. Without workers one
    process does both.
    """

    def __init__(self, limit_s: float = QUICK_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._shared = Spent(0.0, 0.0)
        self._took_s: dict[str, float] = defaultdict(float)
        self._files_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Timed:
        shared, start = self._shared, Spent.so_far()
        value = yield
        # What it had set up itself lies between the two, and is counted once.
        if fixturedef.scope != "function":
            self._shared = shared.plus(Spent.so_far().since(start))
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Timed:
        return (yield from self._timed(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Timed:
        return (yield from self._timed(item))

    def _timed(self, item: pytest.Item) -> Timed:
        if item.get_closest_marker("slow") is not None or _takes_many_examples(item):
            return (yield)
        self._shared, start = Spent(0.0, 0.0), Spent.so_far()
        try:
            return (yield)
        finally:
            own = Spent.so_far().since(start).since(self._shared)
            item.user_properties.append((_TOOK, quiet_s(own, load_per_core())))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gets the times of a test with its last report, also from another process."""
        self._files_s[report.nodeid.partition("::")[0]] += report.duration
        if report.when == "teardown":
            took_s = sum(float(str(s)) for name, s in report.user_properties if name == _TOOK)
            self._took_s[report.nodeid] = took_s

    @property
    def too_slow(self) -> dict[str, float]:
        """The tests that took too long, the slowest first, and their seconds."""
        found = {name: s for name, s in self._took_s.items() if s > self._limit_s}
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    @property
    def longest_files(self) -> dict[str, float]:
        """The files that took longest, and their seconds on the clock. `about_s` follows them."""
        longest = sorted(self._files_s.items(), key=lambda one: -one[1])
        return dict(longest[:MAX_NAMED_FILES])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_slow and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the files that took longest, the tests that took too long, and why some skipped."""
        write = terminalreporter.write_line
        if len(longest := self.longest_files) == MAX_NAMED_FILES:
            terminalreporter.section("longest files")
            for name, s in longest.items():
                write(f"{s:6.0f} s  {name}")
        if self.too_slow:
            terminalreporter.section(f"longer than {self._limit_s:g} s without the mark slow")
            for name, s in self.too_slow.items():
                write(f"{s:5.1f} s  {name}", red=True)
        if skipped := skips_by_reason(terminalreporter.stats.get("skipped", [])):
            terminalreporter.section("skipped")
            for line in skipped:
                write(line)


def skips_by_reason(reports: list[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """One line per reason: how many tests were skipped for it, and in which files."""
    files: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        files[reason.removeprefix("Skipped: ")].append(report.nodeid.partition("::")[0])
    lines = []
    for reason, of in sorted(files.items(), key=lambda one: (-len(one[1]), one[0])):
        first, *others = sorted(set(of))
        more = f" and {len(others)} more" if others else ""
        lines.append(f"{len(of):5} {reason} ({first}{more})")
    return lines
