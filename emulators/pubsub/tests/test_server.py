"""The server as a process and as a `with` block: ports, signals, the clock."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pubsub_emulator.protos import message_class
from pubsub_emulator.server import serve
from tests.limits import WAIT_LIMIT_S
from tests.wire import connect, until

COMMAND = [sys.executable, "-m", "pubsub_emulator"]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {"PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_says_where_it_listens_and_stops_on_a_signal(number: signal.Signals) -> None:
    with running("--port", "0") as process:
        host, _, port = first_line(process).removeprefix("Pub/Sub listening on ").rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        process.send_signal(number)
        _, complaints = process.communicate(timeout=WAIT_LIMIT_S)
        assert process.returncode == 0
        assert complaints == ""


def test_taken_port_is_an_error_with_the_address() -> None:
    with running("--port", "0") as first:
        port = first_line(first).rpartition(":")[2]
        with running("--port", port) as second:
            _, complaints = second.communicate(timeout=WAIT_LIMIT_S)
            assert second.returncode == 1
            assert f"can't listen on 127.0.0.1:{port}" in complaints


@pytest.mark.anyio
async def test_port_is_free_again_after_the_block() -> None:
    async with serve() as server:
        port = server.port
    async with serve(port=port) as server:
        assert server.endpoint == f"127.0.0.1:{port}"


@pytest.mark.anyio
async def test_socket_and_port_lead_to_the_same_broker() -> None:
    # Not tmp_path, which may be too long for a socket path.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pubsub"
        async with (
            serve(socket_path=path) as server,
            connect(server.endpoint) as wire,
            connect(f"unix:{path}") as local,
        ):
            await wire.topic("projects/p/topics/jobs")
            await wire.subscription("projects/p/subscriptions/workers", "projects/p/topics/jobs")
            stream = wire.stream()
            await stream.open("projects/p/subscriptions/workers")
            await local.publish("projects/p/topics/jobs", "a")
            (received,) = (await stream.receive()).received_messages
            assert received.message.data == b"a"


@pytest.mark.anyio
async def test_socket_in_no_folder_is_an_error_with_the_address(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="can't listen on unix:"):
        async with serve(socket_path=tmp_path / "none" / "pubsub"):
            pass


@pytest.mark.anyio
async def test_error_inside_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with serve():
            raise ZeroDivisionError


@pytest.mark.anyio
async def test_lease_ends_by_the_real_clock() -> None:
    async with serve() as server, connect(server.endpoint) as wire:
        await wire.topic("projects/p/topics/jobs")
        await wire.subscription("projects/p/subscriptions/workers", "projects/p/topics/jobs")
        await wire.publish("projects/p/topics/jobs", "a")
        stream = wire.stream()
        await stream.open("projects/p/subscriptions/workers")
        (received,) = (await stream.receive()).received_messages
        await stream.send(modify_deadline_ack_ids=[received.ack_id], modify_deadline_seconds=[1])
        (again,) = (await stream.receive()).received_messages
        assert again.message.message_id == received.message.message_id


@pytest.mark.anyio
async def test_full_storage_is_resource_exhausted_on_the_wire() -> None:
    async with serve(storage_bytes=1000) as server, connect(server.endpoint) as wire:
        await wire.topic("projects/p/topics/jobs")
        await wire.subscription("projects/p/subscriptions/workers", "projects/p/topics/jobs")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await wire.publish("projects/p/topics/jobs", "x" * 1000)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.anyio
async def test_many_streams_on_one_connection_leave_room_for_calls_and_no_consumer_behind() -> None:
    async with serve() as server:
        async with connect(server.endpoint) as wire:
            await wire.topic("projects/p/topics/replies")
            for number in range(120):
                path = f"projects/p/subscriptions/slot-{number}"
                await wire.subscription(
                    path, "projects/p/topics/replies", filter=f'attributes.slot = "{number}"'
                )
                await wire.stream().open(path)
            backlogs = [
                subscription.backlog
                for subscription in server.broker.registry.subscriptions.values()
            ]
            await until(lambda: all(len(backlog.consumers) == 1 for backlog in backlogs))
            assert await wire.publish("projects/p/topics/replies", "calls are answered")
        await until(lambda: not any(len(backlog.consumers) for backlog in backlogs))


@pytest.mark.anyio
async def test_refused_ack_ids_come_with_error_info() -> None:
    async with serve() as server, connect(server.endpoint) as wire:
        topic, path = "projects/p/topics/jobs", "projects/p/subscriptions/workers"
        await wire.topic(topic)
        await wire.subscription(path, topic, enable_exactly_once_delivery=True)
        request = message_class("AcknowledgeRequest")(subscription=path, ack_ids=["gone"])
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await wire.call("Subscriber", "Acknowledge", request, "Empty")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    trailing: Any = error.value.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailing)["grpc-status-details-bin"])
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("EXACTLY_ONCE_ACKID_FAILURE", "pubsub.googleapis.com")
    assert dict(info.metadata) == {"gone": "PERMANENT_FAILURE_INVALID_ACK_ID"}


@pytest.mark.anyio
async def test_all_of_many_refused_ack_ids_are_told() -> None:
    async with serve() as server, connect(server.endpoint) as wire:
        topic, path = "projects/p/topics/jobs", "projects/p/subscriptions/workers"
        await wire.topic(topic)
        await wire.subscription(path, topic, enable_exactly_once_delivery=True)
        stale = [f"1a2b3c4d5e6f70.{1_800_000_000_000_000 + number}.1" for number in range(1000)]
        request = message_class("ModifyAckDeadlineRequest")(
            subscription=path, ack_ids=stale, ack_deadline_seconds=60
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await wire.call("Subscriber", "ModifyAckDeadline", request, "Empty")
    trailing: Any = error.value.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailing)["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert set(info.metadata) == set(stale)


@pytest.mark.anyio
async def test_request_larger_than_any_call_is_refused_unread() -> None:
    async with serve() as server, connect(server.endpoint) as wire:
        await wire.topic("projects/p/topics/jobs")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await wire.publish("projects/p/topics/jobs", "x" * 20 * 1024**2)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await wire.publish("projects/p/topics/jobs", "x" * 11 * 1024**2)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await wire.publish("projects/p/topics/jobs", "the connection stays open")


@pytest.mark.anyio
async def test_failure_of_the_server_has_a_status_and_a_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serve() as server, connect(server.endpoint) as wire:
        server.broker.registry.topics = {"projects/p/topics/broken": None}  # type: ignore[dict-item]
        request = message_class("GetTopicRequest")(topic="projects/p/topics/broken")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await wire.call("Publisher", "GetTopic", request, "Topic")
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "AttributeError" in caplog.text
    assert "AttributeError" not in str(error.value.details())


@pytest.mark.parametrize(
    ("option", "value"),
    [("--port", "99999"), ("--port", "-1"), ("--storage-mib", "-5"), ("--storage-mib", "0")],
)
def test_option_out_of_range_is_refused(option: str, value: str) -> None:
    with running(option, value) as process:
        _, complaints = process.communicate(timeout=WAIT_LIMIT_S)
        assert process.returncode == 2
        assert f"argument {option}: {value} must be from" in complaints
