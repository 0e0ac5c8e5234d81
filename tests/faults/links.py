"""Links that can be slow, cut or frozen: a TCP proxy between each pair of parts, all in one
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import Self

from bench.distant_link import delayed

LIMIT_S = 5.0


class Link:
    """A proxied port.

    Its state changes only in the event loop of Links. `delay_s` applies in each direction.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self.target_port = target_port
        self.delay_s = delay_s
        self.port = 0
        self.is_cut = False
        self.loses_answers = False
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection in both directions until either end closes it."""
        self.writers.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            await self.flowing.wait()
            if self.is_cut:
                return
            back, onward = await asyncio.open_connection("127.0.0.1", self.target_port)
            self.writers.add(onward)
            ways = [
                asyncio.create_task(self._carry(reader, onward)),
                asyncio.create_task(self._carry(back, writer, has_answers=True)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            return
        finally:
            for end in (writer, onward):
                if end is not None:
                    self.writers.discard(end)
                    end.close()

    async def _carry(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        has_answers: bool = False,
    ) -> None:
        with contextlib.suppress(OSError):
            async with contextlib.aclosing(delayed(source, lambda: self.delay_s)) as pieces:
                async for data in pieces:
                    await self.flowing.wait()
                    if has_answers and self.loses_answers:
                        return
                    sink.write(data)
                    await sink.drain()

    def cut(self) -> None:
        """Closes open connections, and closes new ones immediately."""
        self.is_cut = True
        for writer in self.writers:
            writer.transport.abort()

    def lose_answers(self) -> None:
        """Lets requests pass, and closes each connection at the first response."""
        self.loses_answers = True

    def heal(self) -> None:
        self.is_cut = self.loses_answers = False
        self.loses_answers = False
        self.flowing.set()


class Links:
    """The proxies, keyed by name; a context manager.

    Args:
        targets: the target port of each link.
        delays_s: delay in each direction, for distant links only.
    """

    def __init__(
        self, targets: Mapping[str, int], delays_s: Mapping[str, float] | None = None
    ) -> None:
        self._targets = targets
        self._delays_s = delays_s or {}
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="links", daemon=True
        )
        self._links: dict[str, Link] = {}
        self._opened = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._opened.wait(LIMIT_S):
            raise TimeoutError("the links did not open")
        return self

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            for name, port in self._targets.items():
                link = self._links[name] = Link(port, self._delays_s.get(name, 0.0))
                server = await stack.enter_async_context(
                    await asyncio.start_server(link.serve, "127.0.0.1", 0)
                )
                link.port = server.sockets[0].getsockname()[1]
            self._opened.set()
            await self._over.wait()
            for link in self._links.values():
                link.heal()
                link.cut()

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(LIMIT_S)

    def port(self, name: str) -> int:
        return self._links[name].port

    def cut(self, name: str) -> None:
        """Cuts a link: connections are closed, and new ones are closed immediately."""
        self._loop.call_soon_threadsafe(self._links[name].cut)

    def freeze(self, name: str) -> None:
        """Freezes a link: connections stay open, but nothing passes."""
        self._loop.call_soon_threadsafe(self._links[name].flowing.clear)

    def lose_answers(self, name: str) -> None:
        """Cuts connections after the request has arrived but before the response has."""
        self._loop.call_soon_threadsafe(self._links[name].lose_answers)

    def heal(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._links[name].heal)
