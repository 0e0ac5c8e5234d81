"""Classes of one's own through the whole pipeline, by Replicate's clients for Python and Node: the
same results as the classes give when they are called here.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from replicate.client import Client
from replicate.webhook import Webhooks

from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.clients.clients import CLIENTS
from tests.clients.environments import command_of, is_ready
from tests.clients.running import Service, run_checks
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import HEAD

pytestmark = pytest.mark.slow(about_s=60)
KEY = key_for("default")
CLASSES = {
    "turned": """
class Answer(BaseModel):
    text: str
    sizes: list[int]
    file: Path

class Predictor(BasePredictor):
    def predict(
        self,
        text: str,
        file: Path,
        parts: list[Path] = Input(default=[]),
        times: int = Input(default=1, ge=1, le=5),
        mode: str = Input(default="plain", choices=["plain", "loud"]),
        secret: Secret | None = Input(default=None),
    ) -> Answer:
        import tempfile
        whole = Path(tempfile.mkdtemp()) / "turned.txt"
        whole.write_text("".join(one.read_text() for one in [file, *parts])[::-1] * times)
        said = text[::-1].upper() if mode == "loud" else text[::-1]
        said += secret.get_secret_value() if secret else ""
        return Answer(text=said, sizes=[one.stat().st_size for one in [file, *parts]], file=whole)
""",
    "pieces": """
class Predictor(BasePredictor):
    def predict(
        self, text: str = Input(min_length=1), forever: bool = False
    ) -> ConcatenateIterator[str]:
        print("begins")
        if text == "fail":
            raise ValueError("it does not want to")
        while forever:
            time.sleep(0.01)
        for word in text.split():
            yield word[::-1] + " "
""",
    "pages": """
class Predictor(BasePredictor):
    def predict(self, sizes: list[int]) -> Iterator[Path]:
        import tempfile
        for number, size in enumerate(sizes):
            page = Path(tempfile.mkdtemp()) / "page.txt"
            page.write_text(str(number) * size)
            yield page
""",
}
TURNED: dict[str, Any] = {"text": "stressed", "times": 2, "mode": "loud", "secret": "!"}
FILE, PARTS = "f" * 10, ["a" * 70_000, "b"]
PIECES = {"text": "stressed mood"}
PAGES = {"sizes": [3, 70_000, 1]}


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each class."""
    folders = {}
    for name, body in CLASSES.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        (folder / "predict.py").write_text(HEAD + body)
    return folders


def predictor(folder: Path) -> Any:
    """The class, called here."""
    spec = importlib.util.spec_from_file_location(f"own_{folder.name}", folder / "predict.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Predictor()


@pytest.fixture(scope="module")
def expected(classes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the classes give, with files as their texts."""
    from cog import Secret

    folder = tmp_path_factory.mktemp("inputs")
    paths = [folder / str(number) for number in range(3)]
    for path, text in zip(paths, [FILE, *PARTS], strict=True):
        path.write_text(text)
    given = TURNED | {"file": paths[0], "parts": paths[1:], "secret": Secret(TURNED["secret"])}
    answer = predictor(classes["turned"]).predict(**given)
    turned = {"text": answer.text, "sizes": answer.sizes, "file": answer.file.read_text()}
    pieces = list(predictor(classes["pieces"]).predict(**PIECES, forever=False))
    pages = [page.read_text() for page in predictor(classes["pages"]).predict(**PAGES)]
    return {
        "turned": {"input": TURNED, "file": FILE, "parts": PARTS, "output": turned},
        "pieces": {"input": PIECES, "output": pieces},
        "pages": {"input": PAGES, "output": pages},
    }


@pytest.fixture(scope="module")
def url(classes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a stack that serves the classes."""
    folder = tmp_path_factory.mktemp("stack")
    models = folder / "models.yaml"
    entries = [
        {"name": name, "task": "custom", "source": f"local:{path}"}
        for name, path in classes.items()
    ]
    models.write_text(yaml.safe_dump({"models": entries}))
    refresh_interfaces(models, lambda line: None)
    settings = {
        "PENSTOCK_KEYS_URL": keys_url(folder, default="default"),
        "PENSTOCK_MODELS_FILE": str(models),
        "PENSTOCK_PROCESSES": "1",
    }
    with Stack(folder, ports=Ports.free(len(classes)), settings=settings) as stack:
        yield stack.api_url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    opened = Client(api_token=KEY, base_url=url)
    yield opened
    opened._client.close()


def named(text: str) -> io.BytesIO:
    file = io.BytesIO(text.encode())
    file.name = "in.txt"
    return file


def text_of(file: Any) -> str:
    # The client makes files of https: and data: URIs only, and this API speaks plain HTTP.
    return read(file) if isinstance(file, str) else bytes(file.read()).decode()


def test_files_in_and_out(client: Any, expected: dict[str, Any]) -> None:
    given = TURNED | {"file": named(FILE), "parts": [named(text) for text in PARTS]}
    output = client.run("any/turned", input=given)
    assert output | {"file": text_of(output["file"])} == expected["turned"]["output"]


def test_files_inside_the_body(client: Any, expected: dict[str, Any]) -> None:
    given = TURNED | {"file": named(FILE), "parts": [named(text) for text in PARTS]}
    output = client.run("any/turned", input=given, file_encoding_strategy="base64")
    assert output | {"file": text_of(output["file"])} == expected["turned"]["output"]


def test_generators_are_run_and_streamed(client: Any, expected: dict[str, Any]) -> None:
    assert list(client.run("any/pieces", input=PIECES)) == expected["pieces"]["output"]
    pages = [text_of(file) for file in client.run("any/pages", input=PAGES)]
    assert pages == expected["pages"]["output"]
    said = [str(event) for event in client.stream("any/pieces", input=PIECES)]
    assert "".join(said) == "".join(expected["pieces"]["output"])
    created = client.predictions.create(version="pages", input=PAGES)
    uris = [event.data for event in created.stream() if event.event.value == "output"]
    assert [text_of(uri) for uri in uris] == expected["pages"]["output"]


def read(uri: str) -> str:
    if uri.startswith("data:"):
        return base64.b64decode(uri.partition(",")[2]).decode()
    return httpx.get(uri, timeout=WAIT_LIMIT_S).text


def test_logs_cancel_and_errors(client: Any) -> None:
    running = client.predictions.create(version="pieces", input={"text": "a", "forever": True})
    while not running.logs:
        running.reload()
    assert (running.status, running.logs) == ("processing", "begins\n")
    running.cancel()
    running.wait()
    assert (running.status, running.logs) == ("canceled", "begins\n")
    failed = client.predictions.create(version="pieces", input={"text": "fail"})
    failed.wait()
    assert (failed.status, failed.error) == ("failed", "it does not want to")
    assert "ValueError" in failed.logs


def test_a_webhook_has_the_output(client: Any, expected: dict[str, Any]) -> None:
    came = threading.Event()
    calls: list[tuple[dict[str, str], str]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            calls.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()
            came.set()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client.predictions.create(
            version="pieces",
            input=PIECES,
            webhook=f"http://127.0.0.1:{server.server_port}/",
            webhook_events_filter=["completed"],
        )
        assert came.wait(WAIT_LIMIT_S)
        server.shutdown()
    headers, body = calls[0]
    secret = client.webhooks.default.secret()
    Webhooks.validate(headers=headers, body=body, secret=secret)
    assert json.loads(body)["output"] == expected["pieces"]["output"]


def test_replicates_client_for_node(url: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (node,) = (one for one in CLIENTS if one.name == "replicate-node")
    if shutil.which("node") is None or not is_ready(node):
        pytest.skip("replicate-node is not installed: `make clients` does it")
    path = tmp_path / "expected.json"
    path.write_text(json.dumps(expected))
    service = Service(url, KEY, embedder="", painter="", expected=str(path))
    outcomes, _ = run_checks(command_of(replace(node, script="class_checks")), service)
    assert [one for one in outcomes if one.outcome != "passed"] == []
