"""REST requests that no client would send. `malformed.py` sends them along with gRPC requests."""

import asyncio
import copy
import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from google.protobuf import json_format

from pubsub_emulator.protocols.rest_rules import RULES, Rule
from tests.limits import WAIT_LIMIT_S

PULL_LIMIT_S = 3.0
NO_WORDS = ("Exception", "Traceback", "<class", "object at 0x", "<html")
VALUES: tuple[Any, ...] = (
    None, True, -1, 10**30, 1.5, "", "x", "9" * 400, "2026-13-01T00:00:00Z", "-1s", "1e9s", [], {},
    [[]], [None], {"": None}, {"a": {"b": []}}, "====", "a.b,c", "🎈" * 300,
)  # fmt: skip
BODIES = (
    b"", b"{", b"[]", b"null", b"7", b'"text"', b'{"a":1,"a":2}', b"NaN", b'{"name":1e999}',
    b"\xff\xfe", b"[" * 100_000, b'{"a":' * 20_000, b'{"labels":{"a":"\\ud800"}}',
    b'{"messages":[{"data":"*"}]}', b'\xef\xbb\xbf{}', b'{"@type":"x"}', b"{}{}", b"--x\r\n\r\n",
    b'{"messages":' + b"[0" * 3000,
)  # fmt: skip
HEADERS = (
    "Content-Type: text/plain", "Content-Encoding: gzip", "Content-Type: multipart/form-data",
    "Accept: text/html", "X-HTTP-Method-Override: DELETE", "x-goog-api-client: gl-node/",
    "Range: bytes=0-1", "Expect: 100-continue", "x-goog-api-client: \xff\x00",
)  # fmt: skip
PARAMETERS = (
    "pageSize", "page_size", "pageToken", "updateMask", "messages.data", "name", "name.x", "a.b.c",
    "$alt", "key", "options.requestedPolicyVersion", "view", "retainAckedMessages", "labels.a", "",
    ".", "topic.",
)  # fmt: skip


class RestRequests:
    """Generates HTTP requests as bytes from a seed.

    Args:
        fill: fills a protobuf request with random values.
        kinds: request class for each call.
    """

    def __init__(
        self,
        source: random.Random,
        text: Callable[[], str],
        fill: Callable[[Any], Any],
        kinds: dict[str, Callable[[], Any]],
    ) -> None:
        self._random, self._text, self._fill, self._kinds = source, text, fill, kinds

    def next(self) -> tuple[Rule, bytes]:
        """Returns a request and the rule it was generated from."""
        rule, chance = self._random.choice(RULES), self._random.random
        verb = rule.verb if chance() < 0.9 else self._random.choice(("PUT", "BREW", "HEAD", "get"))
        target = self._path(rule) + self._query()
        body = self._body(rule)
        lines = [f"{verb} {target} HTTP/1.1", "Host: x", "Connection: close"]
        if chance() < 0.95:
            lines.append(f"Content-Length: {len(body)}")
        elif chance() < 0.5:
            lines.append(f"Content-Length: {self._random.choice((-1, 5, 10**12, 'x'))}")
        if chance() < 0.1:
            lines.append(self._random.choice(HEADERS))
        return rule, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    def _path(self, rule: Rule) -> str:
        before, _, rest = rule.template.partition("{")
        pattern, _, after = rest.partition("}")
        name = self._text()
        if self._random.random() < 0.8:
            # A name of the kind that the rule expects.
            name = pattern.partition("=")[2].replace("*", "p", 1)
            name = name.replace("*", f"one{self._random.randrange(4)}")
        if self._random.random() < 0.05:
            return self._random.choice(("/", "//", "/v1", "/v2/x", "/v1/%zz", "/v1/%ff%00", "*"))
        return before + quote(name, safe=self._random.choice(("/", "/:", ""))) + after

    def _query(self) -> str:
        if self._random.random() < 0.8:
            return ""
        pairs = [
            f"{self._random.choice(PARAMETERS)}={quote(str(self._value()))}"
            for _ in range(self._random.choice((1, 2, 30)))
        ]
        return "?" + "&".join(pairs)

    def _body(self, rule: Rule) -> bytes:
        if self._random.random() < 0.15:
            return self._random.choice(BODIES)
        request = self._kinds[rule.call]()
        self._fill(request)
        try:
            fields = json_format.MessageToDict(request)
        except (ValueError, TypeError, json_format.Error):
            # An invalid time.
            fields = {"name": self._text()}
        self._damage(fields)
        body = json.dumps(fields).encode()
        return body[: self._random.randrange(len(body))] if self._random.random() < 0.05 else body

    def _value(self) -> Any:
        return copy.deepcopy(self._random.choice(VALUES))

    def _damage(self, fields: Any) -> None:
        """Inserts unknown fields and values of the wrong type."""
        if isinstance(fields, dict):
            if self._random.random() < 0.05:
                fields[self._text() or "x"] = self._value()
            for name in fields:
                if self._random.random() < 0.05:
                    fields[name] = self._value()
                elif isinstance(fields[name], (dict, list)):
                    self._damage(fields[name])
        elif isinstance(fields, list):
            for field in fields:
                self._damage(field)


async def send(endpoint: str, rule: Rule, data: bytes) -> str:
    """Sends a request. Returns its status.

    Raises:
        AssertionError: the response was one that no client should get, or did not arrive in time.
    """
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(PULL_LIMIT_S if rule.call == "Pull" else WAIT_LIMIT_S):
            writer.write(data)
            if _ends_early(data):
                writer.write_eof()
            answer = await reader.read()
    except TimeoutError:
        assert rule.call == "Pull", (rule, data, "no answer")
        return "REST waited"
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    return _judged(data, answer)


def _ends_early(data: bytes) -> bool:
    """True if the server would keep waiting for more of the body."""
    head, _, body = data.partition(b"\r\n\r\n")
    _, _, length = head.partition(b"\r\nContent-Length: ")
    length = length.partition(b"\r\n")[0]
    return length.isdigit() and int(length) > len(body)


def _judged(data: bytes, answer: bytes) -> str:
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    if not answer:
        # The client hangs up before the end of the body.
        return "REST hung up"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    leaks_internals = any(word in body.decode("utf-8", "replace") for word in NO_WORDS)
    assert status < 500 or status == 501, (data, answer)
    assert not leaks_internals, (data, answer)
    if status >= 400 and b"application/json" in head and not data.startswith(b"HEAD"):
        error = json.loads(body)["error"]
        assert error["code"] == status, (data, answer)
        assert all(error[name] for name in ("message", "status")), (data, answer)
    return f"REST {status}"
