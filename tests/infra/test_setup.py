"""`make setup`'s output while a step runs, and when a step fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.limits import WAIT_LIMIT_S

SCRIPT = """\
set -euo pipefail
. infra/step.sh
dot_s=0.1
step "$1" quick true
# Ends once the dots have been seen, so that no clock decides.
step "$1" slow bash -c 'until [ "$(tr -dc . < "$0" | wc -c)" -ge 2 ]; do sleep 0.05; done' "$2"
step "$1" bad bash -c 'echo "no space left"; exit 3'
echo never
"""


def test_long_steps_print_dots_and_a_failure_shows_the_log(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as output:
        done = subprocess.run(
            ["bash", "-c", SCRIPT, "setup", tmp_path / "log", said],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
    shown = said.read_text()
    assert done.returncode == 1
    assert shown.startswith(" quick")
    assert "slow.." in shown
    assert "never" not in shown
    assert "no space left" in done.stderr
