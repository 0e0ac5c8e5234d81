"""Keeps the quick tests quick, and lists the skipped tests by reason.

A test is quick unless its file, or the test itself, is marked `slow`. Quick tests that use more
than QUICK_LIMIT_S of CPU time are listed at the end of a run. They fail the run only in CI, where
the `CI` variable is set, because the same test may take longer on another machine. Neither
wall-clock time nor load counts. Time spent in a shared fixture does not count, because any test
might have been the first to use it.
"""

from __future__ import annotations

import re
import resource
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.limits import PATIENCE

QUICK_LIMIT_S = 5.0 * PATIENCE
"""CPU seconds that a quick test and the programs it starts may use."""
QUICK_EXAMPLES = 15
"""Number of examples for each property test in the quick tier."""
QUICK, SLOW = "not slow", "slow or hypothesis"
"""The tiers, as the `-m` expressions of `make test` and `make test-slow`."""
MAX_NAMED_FILES = 25
"""Maximum number of tests named at the end of a run."""
_ALL_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)
_TOOK = "took_s"

Timed = Generator[None, Any, Any]
"""Type of a function that wraps a pytest hook."""


def examples(usual: int) -> int:
    """The number of examples for a Hypothesis test whose usual number isn't 100.

    The profile determines how many examples 100 stands for: 15 in the quick tier
    (tests/conftest.py).
    """
    return max(1, usual * settings().max_examples // 100)


@cache
def has_none_of(expression: str, path: Path) -> bool:
    """True if all tests in a file or folder are in the other tier, so `-m expression` needn't
    import it.

    A third of the files consist only of slow tests, and import torch and other large libraries.
    Otherwise each process in a run would import them.
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


def used_cpu_s() -> float:
    """CPU seconds used by this process and its children. A child counts once it has been waited
    for.
    """
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _takes_many_examples(item: pytest.Item) -> bool:
    """True for a property test in a run that tries more examples than the quick tier does."""
    is_property = item.get_closest_marker("hypothesis") is not None
    return is_property and settings().max_examples > QUICK_EXAMPLES


class QuickTests:
    """A pytest plugin that measures the CPU time of quick tests.

    The pytest-xdist workers measure, and the process that starts them collects the results. Without
    workers, one process does both.

    Args:
        limit_s: CPU seconds above which a test is listed.
        is_enforced: True if a listed test fails the run.
    """

    def __init__(self, limit_s: float = QUICK_LIMIT_S, *, is_enforced: bool = False) -> None:
        self._limit_s = limit_s
        self._is_enforced = is_enforced
        self._shared_s = 0.0
        self._took_s: dict[str, float] = defaultdict(float)
        self._files_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Timed:
        shared_s, start_s = self._shared_s, used_cpu_s()
        value = yield
        # Fixtures that it requested ran in between and are counted only once.
        if fixturedef.scope != "function":
            self._shared_s = shared_s + used_cpu_s() - start_s
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
        self._shared_s, start_s = 0.0, used_cpu_s()
        try:
            return (yield)
        finally:
            own_s = used_cpu_s() - start_s - self._shared_s
            item.user_properties.append((_TOOK, own_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gets a test's times along with its last report, even from another process."""
        self._files_s[report.nodeid.partition("::")[0]] += report.duration
        if report.when == "teardown":
            took_s = sum(float(str(s)) for name, s in report.user_properties if name == _TOOK)
            self._took_s[report.nodeid] = took_s

    @property
    def too_slow(self) -> dict[str, float]:
        """The tests over the limit with their CPU seconds, slowest first."""
        found = {name: s for name, s in self._took_s.items() if s > self._limit_s}
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    @property
    def longest_files(self) -> dict[str, float]:
        """The slowest files and their wall-clock seconds. `about_s` should match them."""
        longest = sorted(self._files_s.items(), key=lambda one: -one[1])
        return dict(longest[:MAX_NAMED_FILES])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_failure = self._is_enforced and self.too_slow
        if is_failure and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the slowest files, the tests that took too long, and the reasons for skipped
        tests.
        """
        write = terminalreporter.write_line
        if len(longest := self.longest_files) == MAX_NAMED_FILES:
            terminalreporter.section("longest files")
            for name, s in longest.items():
                write(f"{s:6.0f} s  {name}")
        if self.too_slow:
            verdict = "this fails the run" if self._is_enforced else "this fails in CI"
            limit = f"more than {self._limit_s:g} s of CPU time without the mark slow"
            terminalreporter.section(f"{limit}; {verdict}")
            for name, s in self.too_slow.items():
                write(f"{s:5.1f} s  {name}", red=True)
        if skipped := skips_by_reason(terminalreporter.stats.get("skipped", [])):
            terminalreporter.section("skipped")
            for line in skipped:
                write(line)


def skips_by_reason(reports: list[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """One line per reason: how many tests were skipped for it, and the files they are in."""
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
