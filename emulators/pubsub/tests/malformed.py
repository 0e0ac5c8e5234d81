"""`python -m tests.malformed COUNT [SEED]`: sends requests that no client would send.

They are generated from all methods' descriptors: wrong names, huge numbers, unusual masks, unknown
enums, truncated protobufs, bytes that are not HTTP/2. Half of them use REST. The server must reject
each one with a reason, stay alive, and free the memory.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import psutil
from google.protobuf.descriptor import FieldDescriptor

from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.protocols.methods import SUBSCRIBER, unary_methods
from pubsub_emulator.protos import message_class
from tests.kept_server import KeptServer
from tests.limits import WAIT_LIMIT_S
from tests.malformed_rest import RestRequests, send
from tests.wire import TOPIC, Wire, connect

AT_A_TIME = 16
CALL_LIMIT_S = 3.0
NO_WORDS = ("Exception", "Traceback", "<class", "object at 0x", "Error:")
NUMBERS = (0, 1, -1, 7, 600, 601, 10**6, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 253402300800)
TEXTS = (
    "", " ", "x", "-", "projects", "projects//topics/", "projects/p/topics/goog", "a.b.c", "*",
    "push_config.push_endpoint", "labels.a", "name.x", "attributes.k = \"v\"", "NOT (", "é" * 300,
    "\x00", "http://127.0.0.1:1/", "x" * 3000, "projects/p/topics/_deleted-topic_", "AAAA", "🎈",
)  # fmt: skip
NEEDED = frozenset(
    [
        "name",
        "project",
        "parent",
        "topic",
        "subscription",
        "snapshot",
        "schema",
        "resource",
        "messages",
        "data",
        "ack_ids",
        "max_messages",
        "stream_ack_deadline_seconds",
    ]
)
_INTEGERS = frozenset(
    getattr(FieldDescriptor, f"CPPTYPE_{name}") for name in ("INT32", "INT64", "UINT32", "UINT64")
)


class Requests:
    """Generates requests from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._density = 0.0
        kinds = ("topics", "subscriptions", "snapshots", "schemas")
        self._names = [f"projects/p/{kind}/one{number}" for kind in kinds for number in range(4)]
        self._names += [TOPIC, "projects/p"]

    def of(self, message: Any) -> bytes:
        """Fills a message at random and sometimes damages its bytes."""
        self.fill(message)
        data: bytes = message.SerializeToString()
        damage = self.random.random()
        if damage < 0.05:
            return data[: self.random.randrange(len(data) + 1)]
        if damage < 0.1:
            return data + self.random.randbytes(self.random.randrange(40))
        return data

    def fill(self, message: Any) -> None:
        """Fills a message with random values."""
        self._density = self.random.choice((0.02, 0.1, 0.4))
        self._fill(message, 4)

    def _fill(self, message: Any, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            likely = 0.95 if field.name in NEEDED else self._density
            if self.random.random() > likely or (field.message_type and not depth):
                continue
            if field.message_type and field.message_type.GetOptions().map_entry:
                self._fill_map(getattr(message, field.name))
            elif field.is_repeated:
                values = getattr(message, field.name)
                for _ in range(self.random.choice((1, 2, 5))):
                    if field.message_type:
                        self._fill(values.add(), depth - 1)
                    else:
                        values.append(self._value(field))
            elif field.message_type:
                getattr(message, field.name).SetInParent()
                self._fill(getattr(message, field.name), depth - 1)
            else:
                setattr(message, field.name, self._value(field))

    def _fill_map(self, values: Any) -> None:
        for _ in range(self.random.choice((1, 3, 120))):
            try:
                values[self.text() + str(self.random.random())] = self.text()
            except TypeError:
                return

    def _value(self, field: Any) -> Any:
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            text = self._named(field) or self.text()
            return text if field.type == FieldDescriptor.TYPE_STRING else text.encode()
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return self.random.choice((0, 1, 2, 3, 99, -1))
        if field.cpp_type in _INTEGERS:
            bits = 31 if "32" in str(field.type) or field.cpp_type in (1, 3) else 63
            least = 0 if field.cpp_type in (3, 4) else -(2**bits)
            return self.random.choice([number for number in NUMBERS if least <= number < 2**bits])
        return self.random.choice((0.0, -1.0, 1e300, float("nan"), float("inf")))

    def _named(self, field: Any) -> str:
        """Usually returns a name of the kind that the field expects."""
        if self.random.random() < 0.2 or field.name not in NEEDED:
            return ""
        if field.name in {"project", "parent"}:
            return "projects/p"
        kind = field.containing_type.name if field.name == "name" else field.name
        names = [name for name in self._names if f"/{kind.lower()}s/" in name]
        return self.random.choice(names) if names else ""

    def text(self) -> str:
        """Returns a name or some other string."""
        return self.random.choice(self._names if self.random.random() < 0.6 else TEXTS)


async def run(server: KeptServer, count: int, seed: int) -> Counter[str]:
    """Sends `count` requests. Returns response counts by status.

    Raises:
        AssertionError: a response had a status or a message that no client should get.
    """
    requests, statuses = Requests(seed), Counter[str]()
    endpoint, methods = server.endpoint, unary_methods(Broker(lambda: 1e9))
    targets: list[tuple[str, Callable[[], Any]]] = [
        (f"/{method.service}/{method.name}", method.request) for method in methods
    ]
    kinds = {method.name: method.request for method in methods}
    rest = RestRequests(requests.random, requests.text, requests.fill, kinds)
    async with connect(endpoint) as wire:
        await wire.topic(TOPIC)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_metadata_size", 64 * 1024)]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        for start in range(0, count, AT_A_TIME):
            calls = []
            for _ in range(min(AT_A_TIME, count - start)):
                kind = requests.random.random()
                if kind > 0.5:
                    calls.append(send(server.rest_endpoint, *rest.next()))
                elif kind < 0.02:
                    calls.append(_garbage(endpoint, requests.random.randbytes(200)))
                elif kind < 0.06:
                    first = [requests.of(message_class("StreamingPullRequest")()) for _ in range(3)]
                    calls.append(_stream(channel, first))
                else:
                    path, request = requests.random.choice(targets)
                    calls.append(_unary(channel, path, requests.of(request())))
            statuses.update(await asyncio.gather(*calls))
    return statuses


async def _unary(channel: grpc.aio.Channel, path: str, data: bytes) -> str:
    # Only a pull may wait.
    limit_s = CALL_LIMIT_S if path.endswith("/Pull") else WAIT_LIMIT_S
    try:
        await channel.unary_unary(path, None, None)(data, timeout=limit_s)
    except grpc.aio.AioRpcError as error:
        return _judged(path, data, error.code(), str(error.details()))
    return "OK"


async def _stream(channel: grpc.aio.Channel, requests: list[bytes]) -> str:
    path = f"/{SUBSCRIBER}/StreamingPull"
    call: Any = channel.stream_stream(path, None, None)(iter(requests), timeout=WAIT_LIMIT_S)
    code, details = await call.code(), str(await call.details())
    if details == "Internal error from Core":
        # The client's message if the server ended the stream before the client finished sending.
        return "ended first"
    return _judged(path, b"|".join(requests), code, details)


async def _garbage(endpoint: str, data: bytes) -> str:
    host, _, port = endpoint.rpartition(":")
    async with asyncio.timeout(WAIT_LIMIT_S):
        _, writer = await asyncio.open_connection(host, int(port))
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if data[0] % 2 else b""
        writer.write(preface + data)
        writer.close()
    return "no HTTP/2"


def _judged(path: str, data: bytes, code: grpc.StatusCode, details: str) -> str:
    bad = code in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
    late = code is grpc.StatusCode.DEADLINE_EXCEEDED and not path.endswith("Pull")
    leaks_internals = any(word in details for word in NO_WORDS)
    if bad or late or leaks_internals:
        raise AssertionError(path, code, details, data)
    return str(code.name)


async def clear(wire: Wire) -> None:
    """Deletes everything that the requests may have created, in all projects."""
    for kind, service, noun in (
        ("Snapshots", "Subscriber", "Snapshot"),
        ("Subscriptions", "Subscriber", "Subscription"),
        ("Topics", "Publisher", "Topic"),
        ("Schemas", "SchemaService", "Schema"),
    ):
        field = "parent" if kind == "Schemas" else "project"
        request = message_class(f"List{kind}Request")(**{field: "projects/p"})
        listed = await wire.call(service, f"List{kind}", request, f"List{kind}Response")
        for resource in getattr(listed, kind.lower()):
            name = "name" if kind == "Schemas" else noun.lower()
            delete = message_class(f"Delete{noun}Request")(**{name: resource.name})
            await wire.call(service, f"Delete{noun}", delete, "Empty")


async def main(folder: Path, count: int, seed: int) -> str:
    """Runs against a separate server. Returns the result as one line."""
    server = KeptServer(folder, has_rest=True)
    process = psutil.Process(server.start())
    try:
        # Measured once the server has seen every kind of request.
        await run(server, count // 10, seed + 1)
        async with connect(server.endpoint) as wire:
            await clear(wire)
        before = process.memory_info().rss
        statuses = await run(server, count, seed)
        async with connect(server.endpoint) as wire:
            await clear(wire)
            await wire.topic(TOPIC)
            assert len(await wire.publish(TOPIC, "still alive")) == 1
        after = process.memory_info().rss
    finally:
        server.kill()
    growth = after / before - 1
    assert growth < 0.2, f"{before} bytes before, {after} after"
    return f"{count} requests, seed {seed}: {dict(statuses)}, memory {growth:+.1%}"


if __name__ == "__main__":
    with TemporaryDirectory() as data:
        chosen = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**31)
        sys.stdout.write(asyncio.run(main(Path(data), int(sys.argv[1]), chosen)) + "\n")
