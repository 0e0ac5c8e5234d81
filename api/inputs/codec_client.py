"""One picture process, seen from the API: starts it, sends it one order at a time, and kills it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Self

from api.inputs.codec_protocol import LENGTHS, Answer, Asked, Go, Opened, Order, Refused, decode_answer, head_of
from shared.errors import BadInput, PenstockError, Unavailable, error_for_code
from shared.settings import environment_with

COMMAND = (sys.executable, "-W", "ignore", "-m", "api.inputs.codec_server")
"""Pillow warns of what is odd in a picture; strangers are not to fill the log with that."""
PIECE_BYTES = 256 * 1024
"""Handed to the socket at once: 32 MB in one piece would hold the event loop for 10 ms."""
MOST_ANSWERED_BYTES = 512 * 1024 * 1024

Room = Callable[[int], AbstractAsyncContextManager[None]]
"""Waits until so many bytes of memory may be taken, and holds them for the block."""


class PictureChild:
    """A picture process that takes orders; one that died in the middle of one, or was killed, takes no more."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> Self:
        """Starts a process; it need not be ready for its first order to be sent.

        Raises:
            Unavailable: the system gives none.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    # Without our settings, so without our secrets.
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
            # Only a cancellation comes here: there is nothing to connect to that could fail.
            ours.close()
            process.kill()
            await process.wait()
            raise

    @property
    def is_up(self) -> bool:
        """Whether it takes orders."""
        return self._process.returncode is None and not self._writer.is_closing() and not self._reader.at_eof()

    async def run(self, order: Order, data: bytes, room: Room) -> tuple[Answer, bytes]:
        """Has one order done on the picture in `data`; canceled in the middle, it is good for nothing any more.

        Args:
            order: what to do.
            data: the picture as it came.
            room: asked once the picture's header was read, before anything is decoded.

        Raises:
            BadInput: it is no picture that is taken; `field` is to be named by who knows where it came from.
            Unavailable: the process died.
        """
        try:
            await self._send(order, data)
            answer, made = await self._read()
            if isinstance(answer, Opened):
                async with room(answer.cost_bytes):
                    await self._send(Go())
                    answer, made = await self._read()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._death() from error
        if isinstance(answer, Refused):
            raise error_for_code(answer.code, answer.reason)
        return answer, made

    async def _send(self, frame: Asked, data: bytes = b"") -> None:
        self._writer.write(head_of(frame, len(data)))
        whole = memoryview(data)
        for start in range(0, len(whole), PIECE_BYTES):
            self._writer.write(whole[start : start + PIECE_BYTES])
            await self._writer.drain()

    async def _read(self) -> tuple[Answer, bytes]:
        frame_bytes, data_bytes = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        answer = decode_answer(await self._reader.readexactly(frame_bytes))
        if data_bytes > MOST_ANSWERED_BYTES:
            raise ConnectionError(f"an answer of {data_bytes} bytes")
        return answer, await self._reader.readexactly(data_bytes)

    async def _death(self) -> PenstockError:
        await self.end()
        status = self._process.returncode
        if status == -signal.SIGXCPU:
            return BadInput("the image takes too long to decode")
        return Unavailable(f"the process that handled the image ended (status {status})")

    async def end(self) -> None:
        """Ends it at once, whatever it does, and waits until it is gone."""
        self._writer.transport.abort()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
