"""Cog's own HTTP server, which `cog serve` starts in a container, used as the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.cog_comparison.outcome import (
    Outcome,
    Request,
    container_environment,
    put,
    with_described_files,
)

START_LIMIT_S = 60.0
PREDICT_LIMIT_S = 30.0
POLL_S = 0.1
STREAMING_SCHEMA = {"paths": {"/predictions": {"post": {"x-cog-streaming": True}}}}
"""Lets the server stream. It doesn't describe the input, so the server doesn't check inputs."""


class CogServer:
    """A class behind coglet's HTTP server.

    Args:
        folder: a copy of the class's folder, because the class may write into it.
        python: the interpreter that has cog and the class's packages.
        concurrency: maximum number of concurrent predictions.
        streams: True to read pieces as events.
    """

    def __init__(
        self,
        folder: Path,
        reference: str,
        *,
        python: str,
        environment: Mapping[str, str],
        concurrency: int,
        streams: bool,
    ) -> None:
        self._folder = folder
        self._python = python
        self._port = free_port()
        self._streams = streams
        self._environment = {
            **container_environment(python),
            "COG_PREDICT_TYPE_STUB": reference,
            "COG_MAX_CONCURRENCY": str(concurrency),
            "PORT": str(self._port),
            **environment,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._port}", timeout=PREDICT_LIMIT_S, trust_env=False
        )
        self._count = 0

    async def start(self) -> str:
        """Starts the server and waits until the class is set up."""
        if self._streams:
            path = self._folder / ".cog" / "openapi_schema.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(STREAMING_SCHEMA))
        self._process = await asyncio.create_subprocess_exec(
            *(self._python, "-m", "cog.server.http", "--host", "127.0.0.1"),
            cwd=self._folder,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        until_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until_s and self._process.returncode is None:
            try:
                health = (await self._client.get("/health-check")).json()
            except httpx.HTTPError:
                health = {}
            if health.get("status") in ("READY", "BUSY", "UNHEALTHY"):
                return ""
            if health.get("status") == "SETUP_FAILED":
                return str((health.get("setup") or {}).get("logs") or "setup failed")
            await asyncio.sleep(POLL_S)
        return f"not ready in {START_LIMIT_S:g} s"

    async def predict(self, request: Request) -> Outcome:
        """Sends one prediction request over HTTP and returns its outcome."""
        values = copy.deepcopy(request.values)
        for file in request.files:
            put(values, file.at, file.data_uri)
        self._count += 1
        name = f"prediction-{self._count}"
        canceling = None
        if request.cancel_after_s is not None:
            canceling = asyncio.create_task(self._cancel(name, request.cancel_after_s))
        ask = self._predict_streamed if self._streams else self._predict_whole
        try:
            body = {"id": name, "input": values, "context": dict(request.context)}
            outcome = await ask(body)
            while "At capacity" in outcome.error:  # the last prediction's slot is about to be freed
                await asyncio.sleep(POLL_S)
                outcome = await ask(body)
        except httpx.TimeoutException:
            outcome = Outcome("too late")
        except httpx.HTTPError as error:
            outcome = Outcome("died", error=repr(error))
        if canceling is not None:
            canceling.cancel()
        return outcome

    async def _cancel(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._client.post(f"/predictions/{name}/cancel", json={})

    async def _predict_whole(self, body: dict[str, Any]) -> Outcome:
        answer = await self._client.put(f"/predictions/{body['id']}", json=body)
        return _outcome_of(answer.status_code, answer.json())

    async def _predict_streamed(self, body: dict[str, Any]) -> Outcome:
        headers = {"accept": "text/event-stream"}
        pieces: list[Any] = []
        last = Outcome("died", error="the stream ended without a last event")
        path = f"/predictions/{body['id']}"
        stream = self._client.stream("PUT", path, json=body, headers=headers)
        async with stream as answer:
            if answer.status_code >= httpx.codes.BAD_REQUEST:
                return _outcome_of(answer.status_code, json.loads(await answer.aread()))
            kind = ""
            async for line in answer.aiter_lines():
                field, _, rest = line.partition(": ")
                if field == "event":
                    kind = rest
                elif field == "data" and kind == "output":
                    pieces.append(with_described_files(json.loads(rest)["chunk"]))
                elif field == "data" and kind == "completed":
                    last = _outcome_of(answer.status_code, json.loads(rest))
        return last._replace(pieces=pieces)

    async def stop(self) -> None:
        """Kills the server and everything it started."""
        await self._client.aclose()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def free_port() -> int:
    """Returns a TCP port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _outcome_of(status_code: int, answer: Mapping[str, Any]) -> Outcome:
    if status_code == httpx.codes.UNPROCESSABLE_ENTITY:
        return Outcome("refused", error=str(answer.get("detail")))
    metrics = dict(answer.get("metrics") or {})
    metrics.pop("predict_time", None)
    return Outcome(
        str(answer.get("status", f"status {status_code}")),
        with_described_files(answer.get("output")),
        logs=str(answer.get("logs") or ""),
        error=str(answer.get("error") or ""),
        metrics=metrics,
    )
