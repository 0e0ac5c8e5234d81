"""Groups of tests that stay together on one pytest-xdist worker, because they share resources that
take long to start, and the order in which groups start.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest
from xdist.scheduler import LoadFileScheduling

SHARING = (
    "tests/api/usage/",
    "tests/end_to_end/",
    "tests/infra/reports/",
    "tests/workers/functions/",
    "tests/workers/models/",
    "tests/workers/models/generation/",
)
"""Folders whose files share a stack, processes, rows in BigQuery or loaded models. Their subfolders
are separate.
"""
BROKERS = "brokers"
OF_BROKERS = frozenset(
    {
        "tests/shared/test_brokers.py",
        "tests/shared/test_held_messages.py",
        "tests/shared/test_rabbitmq.py",
        "tests/shared/test_rabbitmq_waits.py",
        "tests/workers/functions/test_consumer.py",
        "tests/workers/functions/test_queue_depths.py",
    }
)
"""Files that share a RabbitMQ or Google's emulator, each of which takes many seconds to start."""


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Assigns a whole file at a time to a worker, or all files that share resources.

    The marks for `--dist loadgroup` would do the same, but have no effect in pytest 9.2 and later
    (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


SLOW_S, QUICK_S = 1.0, 0.1
"""Approximate duration of a test on an idle two-core machine, unless a mark specifies one:
`pytest.mark.slow(about_s=60)`, or `pytest.mark.many(about_s=60)` on a property test with many
examples. A test's mark specifies the test's duration, and a file's `pytestmark` specifies the whole
file's duration. It only affects the order.
"""


def about_s(items: Iterable[pytest.Item]) -> float:
    """Approximate total time in seconds for the tests when run one at a time."""
    tests_s, files_s = 0.0, dict[str, float]()
    for item in items:
        marks = (*item.iter_markers_with_node("slow"), *item.iter_markers_with_node("many"))
        if not marks:
            tests_s += QUICK_S
            continue
        node, mark = marks[0]
        if isinstance(node, pytest.Module) and "about_s" in mark.kwargs:
            files_s[node.nodeid] = float(mark.kwargs["about_s"])
        else:
            tests_s += float(mark.kwargs.get("about_s", SLOW_S))
    return tests_s + sum(files_s.values())


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Sorts tests by group, longest first, so that no worker is left with a long group at the end.

    Tests in a group keep their order.
    """
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[group_of(item.nodeid)].append(item)
    by_length = sorted(groups.values(), key=about_s, reverse=True)
    return [item for group in by_length for item in group]


def group_of(nodeid: str) -> str:
    """A test's file, or the name of the group that shares resources with it."""
    file = nodeid.partition("::")[0]
    if file in OF_BROKERS:
        return BROKERS
    folder = file[: file.rfind("/") + 1]
    return folder if folder in SHARING else file
