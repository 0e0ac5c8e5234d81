"""An engine that dies or hangs in the middle of a response.

`python fake_engine.py PROTOCOL ANSWER PLACE --uds SOCKET`. The protocol is `llama.cpp` or `vllm`.
ANSWER is `stream` or `body`: the kind of response during which the engine dies or hangs at PLACE.
`room for N` reports that number of tokens as the size of the cache.
`hang after FILE` creates FILE and hangs before the head, unless FILE exists.
It writes the tokens FIRST_TOKEN, FIRST_TOKEN + 1, and so on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

FIRST_TOKEN = 20
CONTEXT_TOKENS = 1000
TOKENS_BEFORE = 4
"""Number of tokens before the engine dies, for a stream that it cuts off after the head."""


class FakeEngine(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    protocol: ClassVar[str]
    dies_in: ClassVar[str]
    place: ClassVar[str]

    def address_string(self) -> str:
        return ""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.place.startswith("room for "):
            tokens = self.place.removeprefix("room for ")
            self._send_body(
                f'vllm:cache_config_info{{kv_cache_size_tokens="{tokens}"}} 1.0\n'.encode()
            )
            return
        models = [] if self.place == "without a context" else [{"max_model_len": CONTEXT_TOKENS}]
        self._send_body(json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = request.get("n_predict", request.get("max_tokens"))
        answer = "stream" if request.get("stream") else "body"
        place = self.place if answer == self.dies_in else ""
        if place == "before the head":
            die()
        if place.startswith("hang after "):
            with contextlib.suppress(FileExistsError):
                Path(place.removeprefix("hang after ")).touch(exist_ok=False)
                threading.Event().wait()
        if answer == "stream":
            self._stream(tokens, place)
        else:
            self._send_body(
                json.dumps(self._event(range(tokens), tokens, "length")).encode(), place
            )

    def _send_body(self, data: bytes, place: str = "") -> None:
        self._send_head("Content-Length", str(len(data)))
        if place == "after the head":
            die()
        if place == "in the body":
            self.wfile.write(data[: len(data) // 2])
            die()
        self.wfile.write(data)

    def _stream(self, tokens: int, place: str) -> None:
        self._send_head("Transfer-Encoding", "chunked")
        if place == "after the head":
            die()
        if place == "behind an empty stream":
            self._send_chunk(b"")
            die()
        for token in range(TOKENS_BEFORE if place else tokens):
            self._send_chunk(self._encode([token], token + 1))
        if place == "hang":
            threading.Event().wait()
        if place:
            self._die_in_stream(place)
        self._send_chunk(self._encode([], tokens, "length"))
        self._send_chunk(b"")

    def _die_in_stream(self, place: str) -> None:
        event = self._encode([TOKENS_BEFORE], TOKENS_BEFORE + 1)
        if place == "in an event":
            self._send_chunk(event[: len(event) // 2])
        elif place == "in a chunk":
            self.wfile.write(f"{len(event):x}\r\n".encode() + event[: len(event) // 2])
        elif place == "behind a stream without an end":
            self._send_chunk(b"")
        elif place == "as it shuts down":
            self._send_chunk(self._encode([], TOKENS_BEFORE, "abort"))
            self._send_chunk(b"")
        die()

    def _encode(self, numbers: list[int], count: int, reason: str | None = None) -> bytes:
        event = b"data: " + json.dumps(self._event(numbers, count, reason)).encode() + b"\n\n"
        is_done = reason is not None and self.protocol == "vllm"
        return event + (b"data: [DONE]\n\n" if is_done else b"")

    def _event(self, numbers: Any, count: int, reason: str | None) -> dict[str, Any]:
        tokens = [FIRST_TOKEN + number for number in numbers]
        if self.protocol == "vllm":
            return {"choices": [{"token_ids": tokens, "finish_reason": reason}]}
        return {"tokens": tokens, "tokens_predicted": count, "stop": reason is not None}

    def _send_head(self, name: str, value: str) -> None:
        self.send_response(200)
        self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class Server(socketserver.ThreadingUnixStreamServer):
    """A server on a Unix socket."""

    daemon_threads = True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    FakeEngine.protocol, FakeEngine.dies_in, FakeEngine.place = sys.argv[1:4]
    with Server(sys.argv[-1], FakeEngine) as server:
        server.serve_forever()
