"""Which tests stay together on one worker of pytest-xdist, because they share what takes long to
start.
"""

from xdist.scheduler import LoadFileScheduling

SHARING = ("tests/end_to_end/", "tests/workers/models/")
"""Folders that share a stack or loaded models between their files."""


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Hands a worker a whole file at a time, or a whole folder of SHARING.

    The marks of `--dist loadgroup` would say the same, but have no effect from pytest 9.2 on
    (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The file of a test, or its folder where that one's files share."""
    shared = (folder for folder in SHARING if nodeid.startswith(folder))
    return next(shared, nodeid.partition("::")[0])
