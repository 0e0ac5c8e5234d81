"""The API's side of one codec process: starts it, sends it one command at a time, and kills it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Self

from api.inputs.codec_protocol import (
    LENGTHS,
    CodecCommand,
    CodecError,
    CodecReply,
    CodecRequest,
    HeaderRead,
    Proceed,
    decode_reply,
    frame_header,
)
from shared.errors import BadInput, PenstockError, Unavailable, error_for_code
from shared.settings import environment_with

COMMAND = (sys.executable, "-W", "ignore", "-m", "api.inputs.codec_server")
"""Without warnings: callers must not fill the log with Pillow's warnings about their images."""
PIECE_BYTES = 256 * 1024
"""Bytes per write: 32 MB in one write would block the event loop for 10 ms."""
MAX_REPLY_BYTES = 512 * 1024 * 1024
EXIT_LIMIT_S = 2.0
"""For a process that closed its socket, until it is gone or is killed."""

ReserveMemory = Callable[[int], AbstractAsyncContextManager[None]]
"""Waits until so many bytes of the memory budget are free, and holds them during the block."""


class CodecClient:
    """A codec process.

    After a command that was canceled or killed it, it takes no more commands.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> Self:
        """Starts a process. Its first command may be sent before it is ready.

        Raises:
            Unavailable: the system could not start one.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    # Without the settings of the API, so without its secrets.
                    env=environment_with({}),
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise Unavailable(f"no process for images could be started: {error}") from error
            except BaseException:
                ours.close()
                raise
        try:
            return cls(process, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            # Only a cancellation gets here: the socket is already connected.
            ours.close()
            process.kill()
            await process.wait()
            raise

    @property
    def is_up(self) -> bool:
        """Whether it takes commands."""
        return (
            self._process.returncode is None
            and not self._writer.is_closing()
            and not self._reader.at_eof()
        )

    async def run(
        self, command: CodecCommand, data: bytes, reserve: ReserveMemory
    ) -> tuple[CodecReply, bytes]:
        """Runs one command on the image in `data`.

        If the call is canceled, the process must be killed.

        Args:
            command: what to do.
            data: the image file.
            reserve: called after the image header was read, before anything is decoded.

        Raises:
            BadInput: the image was refused. The caller adds the name of the field.
            Unavailable: the process died.
        """
        try:
            await self._send(command, data)
            reply, made = await self._read()
            if isinstance(reply, HeaderRead):
                async with reserve(reply.cost_bytes):
                    await self._send(Proceed())
                    reply, made = await self._read()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._death_error() from error
        if isinstance(reply, CodecError):
            raise error_for_code(reply.code, reply.reason)
        return reply, made

    async def _send(self, frame: CodecRequest, data: bytes = b"") -> None:
        self._writer.write(frame_header(frame, len(data)))
        whole = memoryview(data)
        for start in range(0, len(whole), PIECE_BYTES):
            self._writer.write(whole[start : start + PIECE_BYTES])
            await self._writer.drain()

    async def _read(self) -> tuple[CodecReply, bytes]:
        frame_bytes, data_bytes = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        reply = decode_reply(await self._reader.readexactly(frame_bytes))
        if data_bytes > MAX_REPLY_BYTES:
            raise ConnectionError(f"a reply of {data_bytes} bytes")
        return reply, await self._reader.readexactly(data_bytes)

    async def _death_error(self) -> PenstockError:
        self._writer.transport.abort()
        # It ends by itself. A kill polls the process first, which can take its exit status from
        # the thread that waits for it: asyncio then reports 255.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self._process.wait()
        await self.kill()
        status = self._process.returncode
        if status == -signal.SIGXCPU:
            return BadInput("the image takes too long to decode")
        return Unavailable(f"the process that handled the image ended (status {status})")

    async def kill(self) -> None:
        """Kills the process and waits until it is gone."""
        self._writer.transport.abort()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
