"""Cog's own server, the reference for a class's results."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from shared.models.interface import ModelInterface
from tests.limits import WAIT_LIMIT_S


class Prediction(NamedTuple):
    """The response from Cog's server. `error` is empty if the prediction succeeded."""

    output: Any
    error: str
    logs: str = ""


class CogServer:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=WAIT_LIMIT_S, trust_env=False)

    def read_status(self) -> str:
        """Returns the status reported by the server: `READY` once the class is set up."""
        with contextlib.suppress(httpx.TransportError):
            return str(self._client.get("/health-check").json()["status"])
        return "UNREACHABLE"

    def predict(self, values: dict[str, Any], **more: Any) -> Prediction:
        """Runs one prediction. `more`: additional fields in the body."""
        answer = self._post({"input": values, **more})
        if "status" not in answer:  # the input is not valid
            return Prediction(None, json.dumps(answer["detail"]))
        is_right = answer["status"] == "succeeded"
        error = "" if is_right else str(answer["error"])
        return Prediction(answer.get("output"), error, str(answer.get("logs", "")))

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Retries while the previous prediction's slot is still being freed."""
        until_s = time.monotonic() + WAIT_LIMIT_S
        while True:
            answer: dict[str, Any] = self._client.post("/predictions", json=body).json()
            is_busy = "At capacity" in str(answer.get("error"))
            if not is_busy or time.monotonic() > until_s:
                return answer
            time.sleep(0.05)

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def serve_by_cog(
    folder: Path, interface: ModelInterface, name: str = "Predictor"
) -> Iterator[CogServer]:
    """Serves the class called `name` from a folder's predict.py, using the schema we inferred."""
    schemas = {"Input": interface.inputs, "Output": interface.output}
    (folder / ".cog").mkdir()
    schema = {"components": {"schemas": schemas}}
    (folder / ".cog" / "openapi_schema.json").write_text(json.dumps(schema))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"],
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PORT": str(port),
                "COG_PREDICT_TYPE_STUB": f"predict.py:{name}",
            },
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        server = CogServer(f"http://127.0.0.1:{port}")
        try:
            until_s = time.monotonic() + WAIT_LIMIT_S
            while (status := server.read_status()) != "READY":
                is_starting = status in ("UNREACHABLE", "STARTING") and process.poll() is None
                assert is_starting, (folder / "server.log").read_text()
                assert time.monotonic() < until_s, (folder / "server.log").read_text()
                time.sleep(0.05)
            yield server
        finally:
            server.close()
            process.kill()
            process.wait()
