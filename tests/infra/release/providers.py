"""Terraform's providers for a release: the stand-in named by TFOFFLINE provides them and is kept
running, so that Terraform itself can be run the way the scripts run it, with its own state in its
own backend.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.infra.deploy.terraform import CHECKER
from tests.limits import START_LIMIT_S

NEEDED = """terraform {
  required_providers {
    google = { source = "hashicorp/google", version = ">= 7.40.0, < 8.0.0" }
    google-beta = { source = "hashicorp/google-beta", version = ">= 7.40.0, < 8.0.0" }
    helm = { source = "hashicorp/helm", version = ">= 3.0.0, < 4.0.0" }
    random = { source = "hashicorp/random", version = ">= 3.7.0, < 4.0.0" }
  }
}
"""
ANSWERS = {
    "modules/redis": """locals {
  _primary = [
    for id in [google_memorystore_instance.default.id] : { ip_address = "192.0.2.1", port = 6379 }
  ]
}
""",
    "modules/region": """output "api" {
  value = {
    endpoint_group = one([for one in google_compute_region_network_endpoint_group.api : one.id])
    service        = one([for one in google_cloud_run_v2_service.api : one.name])
    uri            = one([for one in google_cloud_run_v2_service.api : "https://${one.name}.run.app"])
  }
}
""",
}
"""Google's responses that the stand-in lacks, as files that take precedence over ours."""
HOOK = """#!/bin/sh
# Stands for Terraform: tells what it was given, and keeps the providers up until it is told to end.
printf %s "$TF_REATTACH_PROVIDERS" > "{out}.new" && mv "{out}.new" "{out}"
cat > /dev/null < "{gate}"
exit 1
"""


def put_answers(tree: Path) -> None:
    """Makes a tree's modules use Google's responses."""
    for module, text in ANSWERS.items():
        (tree / "infra/terraform" / module / "google_override.tf").write_text(text)


@contextmanager
def providers(folder: Path) -> Iterator[Path]:
    """Yields the file whose content Terraform reads as TF_REATTACH_PROVIDERS."""
    root = folder / "providers"
    root.mkdir()
    (root / "main.tf").write_text(NEEDED)
    attach, gate, hook = folder / "attach", folder / "gate", folder / "hook"
    os.mkfifo(gate)
    hook.write_text(HOOK.format(out=attach, gate=gate))
    hook.chmod(0o755)
    assert shutil.which(CHECKER), CHECKER
    process = subprocess.Popen(
        [CHECKER, "-q", "plan", str(root)],
        env=os.environ | {"TFOFFLINE_TERRAFORM": str(hook)},
        stdout=subprocess.DEVNULL,
    )
    # Opened for both reading and writing, so that opening never blocks; the hook ends once it is
    # closed.
    held = os.open(gate, os.O_RDWR)
    try:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not attach.exists():
            assert process.poll() is None, "the stand-in ended before it had begun"
            assert time.monotonic() < deadline_s, "the stand-in did not start"
            time.sleep(0.05)
        yield attach
    finally:
        os.close(held)
        process.wait(START_LIMIT_S)
