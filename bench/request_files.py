"""`python -m bench.request_files`: lists the files that one text passes through.

Starts the stack with the text model alone, sends one text that no cache has, and lists every file
of api, shared and workers in which a function ran in that time, in any process. Work in the
background of the same moment counts too: some four files.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from infra.local.ports import Ports
from infra.local.stack import Stack

ROOT = Path(__file__).parents[1]
HOOK = Path(__file__).parent / "trace_hook"
MODEL = "all-MiniLM-L6-v2"
SETTLE_S = 3.0


def main() -> None:
    """Prints the files, and how many lines they have."""
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(trace(Path(folder)))
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    print("\n".join(files))
    print(f"{len(files)} files, {lines:,} lines")


def trace(folder: Path) -> set[str]:
    """The files that one text passes through."""
    (folder / "is_on").write_bytes(b"\0")
    # The children of this process read these at their start. The stack drops unknown PENSTOCK_*.
    os.environ["TRACE_DIR"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HOOK), str(ROOT)))
    settings = {"PENSTOCK_MODELS_FILE": str(text_model_only(folder))}
    with Stack(
        folder / "state", ports=Ports.free(), settings=settings, say=lambda line: None
    ) as stack:
        send(stack.api_url, "warm up")
        time.sleep(SETTLE_S)
        with noting(folder):
            send(stack.api_url, "a text that was never sent before")
    return {line for found in folder.glob("*.files") for line in found.read_text().splitlines()}


def text_model_only(folder: Path) -> Path:
    """A catalog of one model, in torch and fp32, so that no backend is measured during the run."""
    catalog = yaml.safe_load((ROOT / "models.yaml").read_text())
    entry = next(one for one in catalog["models"] if one["name"] == MODEL)
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [entry | {"backend": "torch", "precision": "fp32"}]}))
    return path


@contextmanager
def noting(folder: Path) -> Iterator[None]:
    """Notes calls until a moment after the block, when the worker has acked."""
    (folder / "is_on").open("r+b").write(b"\1")
    yield
    time.sleep(0.15)
    (folder / "is_on").open("r+b").write(b"\0")


def send(url: str, text: str) -> None:
    """Has one text embedded."""
    body = {"model": MODEL, "input": text}
    httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).raise_for_status()


if __name__ == "__main__":
    main()
