"""Classes that wrap a server, a command or a download work unchanged (wrappers.py)."""

from __future__ import annotations

import http.server
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.process import free_port
from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass
from tests.workers.models.custom.wheels import make_wheel
from tests.workers.models.custom.wrappers import COMMANDS, TOOLS, WRAPPERS

pytestmark = pytest.mark.slow(about_s=60)
MIN_WORKING = 15
"""Minimum number of wrappers that work on a system without /src."""


class Download(http.server.BaseHTTPRequestHandler):
    """The file that classes download: a mapping from lowercase to uppercase letters."""

    def do_GET(self) -> None:
        data = json.dumps({ord(one): one.upper() for one in "abcdefghijklmnopqrstuvwxyz"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keeps request logs out of the output."""


@pytest.fixture(scope="module")
def source() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Download)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/weights.tar"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder outside /tmp, with the wheel and the environment shared by all classes."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        make_wheel(Path(folder, "wheels"), "tools", "1.0", TOOLS, scripts=COMMANDS)
        yield Path(folder)


@pytest.fixture(autouse=True)
def _environments_are_shared(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENVIRONMENTS_DIR", str(shared / "environments"))


def write(folder: Path, files: dict[str, str], shared: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    links = f"--find-links {shared}/wheels\n"
    (folder / "requirements.txt").write_text(f"{links}tools==1.0\n")


@pytest.fixture(scope="module")
def has_src(tmp_path_factory: pytest.TempPathFactory) -> bool:
    body = "class Predictor(BasePredictor):\n    def predict(self) -> str: return os.getcwd()"
    folder = write_class(tmp_path_factory.mktemp("src"), body)
    with StartedClass(entry_of(folder), folder) as model:
        return bool(output_of(compute(model, {})) == "/src")


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_works_as_it_is(name: str, shared: Path, source: str, has_src: bool) -> None:
    folder = shared / name.replace("/", "").replace(" ", "-")
    wrapper = WRAPPERS[name]
    write(folder, wrapper.written(free_port(), source), shared)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if wrapper.needs_src and not has_src:
        pytest.skip("this system gives classes no /src")
    for _ in range(2):  # leftovers from the first process cause no problems
        with StartedClass(entry_of(folder), folder) as model:
            assert output_of(compute(model, {"text": "told"})) == "TOLD"
            assert output_of(compute(model, {"text": "once"})) == "ONCE"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_most_of_them_need_no_src() -> None:
    assert len(WRAPPERS) == 20
    assert sum(not one.needs_src for one in WRAPPERS.values()) >= MIN_WORKING
