"""Commands find the stack that is running in their folder, unless a setting specifies a different
one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.process import Process
from infra.local.running_stack import (
    FILE,
    Announcement,
    RunningStack,
    find_running_stack,
    hold_state_folder,
)
from shared.errors import ConfigurationError
from shared.settings import environment_with
from tests.limits import WAIT_LIMIT_S

ROOT = Path(__file__).parents[2]


@pytest.fixture
def announcement(tmp_path: Path) -> Iterator[Announcement]:
    with hold_state_folder(tmp_path / "var") as opened:
        yield opened


def penstock(folder: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, with only these settings."""
    environment = environment_with(settings) | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "infra.cli.main", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )


def test_stack_is_found_while_it_runs_only(tmp_path: Path) -> None:
    stack = RunningStack({"PENSTOCK_REGION": "here"}, {"api": 1}, needs_keys=False)
    with hold_state_folder(tmp_path) as opened:
        assert find_running_stack(tmp_path) is None
        opened.update(stack)
        assert find_running_stack(tmp_path) == stack
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert find_running_stack(tmp_path) is None
    (tmp_path / FILE).write_text("left by a stack that was killed")
    assert find_running_stack(tmp_path) is None


def test_second_stack_in_a_folder_is_refused(tmp_path: Path) -> None:
    with (
        hold_state_folder(tmp_path),
        pytest.raises(ConfigurationError, match="another penstock up is already running in"),
        hold_state_folder(tmp_path),
    ):
        pass


def test_keys_are_made_in_the_directory_of_the_stack(
    tmp_path: Path, announcement: Announcement
) -> None:
    url = (tmp_path / "keys.json").as_uri()
    announcement.update(RunningStack({"PENSTOCK_KEYS_URL": url}, {}, needs_keys=False))
    assert penstock(tmp_path, "keys", "init").returncode == 0
    made = penstock(tmp_path, "keys", "create", "--tenant", "acme", "--name", "production")
    assert made.stdout.startswith("pk_live_")
    assert (
        f"it serves requests without keys; to require them, start it with PENSTOCK_KEYS_URL={url}"
        in made.stderr
    )
    elsewhere = penstock(tmp_path, "keys", "list", PENSTOCK_PROJECT="production")
    assert elsewhere.returncode == 1
    assert "PENSTOCK_KEYS_URL is not set" in elsewhere.stderr


def test_missing_settings_are_named(tmp_path: Path) -> None:
    refused = penstock(tmp_path, "keys", "create", "--tenant", "acme", "--name", "production")
    assert "PENSTOCK_KEYS_URL is not set: set it to the key directory" in refused.stderr
    refused = penstock(tmp_path, "kill", "worker")
    assert f"penstock up is not running in {tmp_path / 'var'}" in refused.stderr


def test_worker_is_killed_by_name(tmp_path: Path, announcement: Announcement) -> None:
    with Process(
        "victim", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path
    ) as victim:
        running = {"api": 2**30, "worker-mini": victim.pid}
        announcement.update(RunningStack({}, running, needs_keys=False))
        refused = penstock(tmp_path, "kill", "work")
        assert "there is no process 'work'; choose one of api, worker-mini" in refused.stderr
        killed = penstock(tmp_path, "kill", "worker")
        assert killed.stdout == f"killed worker-mini, process {victim.pid}\n"
        victim.wait_ready(lambda: not victim.is_running, WAIT_LIMIT_S)
        assert victim.ending == "was killed by SIGKILL"


def test_process_with_exactly_the_name_is_killed(
    tmp_path: Path, announcement: Announcement
) -> None:
    with Process(
        "victim", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path
    ) as victim:
        running = {"worker-mini-large": 2**22 + 1, "worker-mini": victim.pid}
        announcement.update(RunningStack({}, running, needs_keys=False))
        killed = penstock(tmp_path, "kill", "worker-mini")
        assert killed.stdout == f"killed worker-mini, process {victim.pid}\n"
    refused = penstock(tmp_path, "kill", "worker-mini-large")
    assert "name: worker-mini-large, process 4194305, has just exited" in refused.stderr
