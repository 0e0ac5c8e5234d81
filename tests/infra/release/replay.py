"""A replay of a first release: the runbook's commands, then the two builds, in the order in which a
reader would run them after cloning the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from tests.infra.release.api import NUMBER, Ask
from tests.infra.release.builds import Build, StepFailed, in_order, programs_of, resolve, run_step
from tests.infra.release.cloud import Cloud
from tests.infra.release.servers import metadata_server
from tests.limits import TEST_LIMIT_S
from tests.source_files import source_files

PROJECT, REGION, OWNER = "my-project", "europe-west4", "owner@example.com"
BUILD = f"penstock-build@{PROJECT}.iam.gserviceaccount.com"
DEPLOY = f"penstock-deploy@{PROJECT}.iam.gserviceaccount.com"
DEPLOY_PAGE, KEYS = Path("docs/how-to/deploy.md"), Path("docs/how-to/keys.md")
IN_A_BROWSER = "gcloud auth login --update-adc"
"""The only command that requires a person."""
CHECKS = {
    "PYTEST_ADDOPTS": "tests/test_source_files.py tests/infra/deploy/test_settings.py",
    "PYTEST_WORKERS": "1",
}
"""Limits a build's tests to a few that check the tree itself.

All the tests together would take minutes.
"""
NEEDS_AN_INDEX = ("setup",)
"""Steps that install packages and therefore access the outside network."""


class CommandFailed(Exception):
    """One of the runbook's commands failed; the message is its output."""


def blocks(document: Path, heading: str) -> list[str]:
    """The shell commands in a section of a document, by block."""
    text = document.read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^( *)```sh\n(.*?)^ *```", section, re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


@dataclass
class Replay:
    """Settings and folders for replaying a release.

    Attributes:
        url: URL of the proxy in front of the stand-in for Google.
        folder: contains everything that is written.
        checkout: the tree of the person following the runbook.
    """

    cloud: Cloud
    url: str
    authority: Path
    programs: Path
    folder: Path
    checkout: Path
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self, account: str, metadata: str) -> dict[str, str]:
        """Environment variables for commands that run as `account`."""
        home = self.folder / "homes" / account
        home.mkdir(parents=True, exist_ok=True)
        token = home / "token"
        token.write_text(f"token-of-{account}")
        self.cloud.tokens[token.read_text()] = account
        trusted = str(self.authority)
        return {
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "HTTPS_PROXY": self.url,
            "https_proxy": self.url,
            "NO_PROXY": "127.0.0.1,localhost",
            "SSL_CERT_FILE": trusted,
            "REQUESTS_CA_BUNDLE": trusted,
            "CURL_CA_BUNDLE": trusted,
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(token),
            "CLOUDSDK_CONFIG": str(home / "gcloud"),
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
            "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE": trusted,
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        }

    def run(self, block: str) -> str:
        """Runs commands from the runbook as the owner. Returns their output.

        Raises:
            CommandFailed: one of the commands failed.
        """
        kept = self.folder / "exported"
        script = f"set -euo pipefail\n{block}\nexport -p > {kept}\n"
        with metadata_server(PROJECT, OWNER, f"token-of-{OWNER}") as metadata:
            environment = self.environment(OWNER, metadata)
            # Settings made by the page apply only to its later blocks.
            begin = f"source {kept}\n" if kept.exists() else ""
            given = "".join(f"export {name}='{value}'\n" for name, value in environment.items())
            done = subprocess.run(
                ["bash", "-c", begin + given + script],
                cwd=self.checkout,
                env={"PATH": f"{self.programs}:{os.environ['PATH']}", **self.variables},
                input="yes\n" * 5,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TEST_LIMIT_S,
                check=False,
            )
        if done.returncode != 0:
            raise CommandFailed(f"{block}\n{done.stdout[-6000:]}")
        return done.stdout

    def workspace(self, build: Mapping[str, Any], name: str) -> Path:
        """The folder in which a build starts, either with its source or empty."""
        made = self.folder / name
        made.mkdir()
        if source := (build.get("source") or {}).get("storageSource"):
            data = self._fetched(build, source["bucket"], source["object"])
            # tarfile has no filters before Python 3.11.4 and requires one starting with 3.12.
            subprocess.run(["tar", "-xz", "-C", made], input=data, check=True)
        return made

    def _fetched(self, build: Mapping[str, Any], bucket: str, name: str) -> bytes:
        """A build's source, which Cloud Build reads with the build's own account."""
        account = build["serviceAccount"].rpartition("/")[2].replace("$PROJECT_ID", PROJECT)
        path = f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        asked = Ask(account, "GET", "storage.googleapis.com", path, {"alt": "media"}, b"", {})
        reply = self.cloud.answer(asked)
        if reply.status != 200:
            raise StepFailed("source", reply.body.decode())
        return reply.body

    def build(
        self,
        found: Mapping[str, Any],
        workspace: Path,
        *,
        only: Callable[[str], bool] = lambda step: True,
        given: Mapping[str, str] = MappingProxyType({}),
    ) -> list[str]:
        """Runs a build's steps, or just the ones in `only`. Returns their ids in execution order.

        Raises:
            StepFailed: a step failed.
        """
        built_in = {
            "PROJECT_ID": PROJECT,
            "PROJECT_NUMBER": NUMBER,
            "BUILD_ID": found.get("id", "d0000000-0000-4000-8000-000000000000"),
            "COMMIT_SHA": "",
            "LOCATION": REGION,
        }
        replaced = {**found, "substitutions": {**found.get("substitutions", {}), **given}}
        build = resolve(replaced, built_in)
        ran = []
        with metadata_server(PROJECT, build.account, f"token-of-{build.account}") as metadata:
            for step in in_order(build.steps):
                if only(step["id"]):
                    self._step(step, build, workspace, metadata)
                    ran.append(step["id"])
        return ran

    def _step(self, step: Mapping[str, Any], build: Build, workspace: Path, metadata: str) -> None:
        path = programs_of(step["name"], self.programs, self.folder / "images")
        environment = self.environment(build.account, metadata)
        environment["CLOUDSDK_CORE_PROJECT"] = PROJECT  # gcloud reads it from the metadata
        if step["id"] in NEEDS_AN_INDEX:
            environment = {
                name: value
                for name, value in os.environ.items()
                if name.startswith(("PIP_", "SSL_", "UV_")) or name.lower().endswith("_proxy")
            } | {"HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}
        if step["id"] == "tests":
            environment |= CHECKS
        run_step(step, workspace, path, environment)


def check_out(folder: Path) -> Path:
    """Clones this tree in its current state, with the results of `make setup`."""
    made = folder / "checkout"
    for path in source_files():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, made / path, follow_symlinks=False)
    (made / ".git").mkdir()
    (made / ".git/HEAD").write_text("ref: refs/heads/main\n")
    link_environment(made)
    return made


def link_environment(tree: Path) -> None:
    """Links this test's environment into `tree`, in place of the one `make setup` would create."""
    (tree / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".installed":
            (tree / ".venv" / entry.name).symlink_to(entry)
    (tree / ".venv/.installed").touch()


__all__ = ["CommandFailed", "Replay", "StepFailed", "blocks", "check_out", "link_environment"]
