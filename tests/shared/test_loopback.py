"""Requests to this machine never use a proxy, no matter which variables configure one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from infra.local.process import free_port
from shared.process.loopback import LOOPBACK_HOSTS, exempt_loopback_from_proxies
from tests.limits import WAIT_LIMIT_S

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
EXCEPTIONS = ("no_proxy", "no_grpc_proxy")
ASKS = """
import os, sys, urllib.request
from shared.process.loopback import exempt_loopback_from_proxies
exempt_loopback_from_proxies()
import grpc, httpx, requests
port, unused = sys.argv[1:]
url = f"http://127.0.0.1:{port}/"
print(urllib.request.urlopen(url).status)
print(httpx.get(url).status_code)
print(requests.get(url).status_code)
print(httpx.get(f"http://localhost:{port}/").status_code)
with grpc.insecure_channel(f"127.0.0.1:{unused}") as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=60)
    except grpc.RpcError as error:
        print(f"127.0.0.1:{unused}" in error.details() or error.details())
"""


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    "exceptions",
    [{}, {"NO_PROXY": "example.org"}, {"no_proxy": "example.org", "no_grpc_proxy": "a.b"}],
    ids=["none", "uppercase", "of-grpc"],
)
@pytest.mark.parametrize("spelling", [str.lower, str.upper], ids=["lowercase", "uppercase"])
def test_clients_reach_this_machine_although_the_proxy_is_dead(
    spelling: Callable[[str], str], exceptions: dict[str, str]
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    usual = {
        name: value
        for name, value in os.environ.items()
        if name.lower() not in (*PROXIES, *EXCEPTIONS)
    }
    proxies = {spelling(name): dead for name in PROXIES}
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [sys.executable, "-c", ASKS, str(server.server_port), str(free_port())],
            env=usual | proxies | exceptions,
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        server.shutdown()
    assert done.stdout.split() == ["200", "200", "200", "200", "True"], done.stderr


def test_other_exceptions_stay() -> None:
    hosts = ",".join(LOOPBACK_HOSTS)
    variables = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "10.0.0.0/8, .corp,127.0.0.1"}
    exempt_loopback_from_proxies(variables)
    exempt_loopback_from_proxies(variables)
    assert variables["NO_PROXY"] == "10.0.0.0/8,.corp,127.0.0.1,localhost,::1"
    assert variables["no_proxy"] == variables["NO_PROXY"]
    apart = {"all_proxy": "socks5://proxy", "no_proxy": "*", "NO_PROXY": ".corp"}
    exempt_loopback_from_proxies(apart)
    assert (apart["no_proxy"], apart["NO_PROXY"]) == ("*", f".corp,{hosts}")


def test_nothing_changes_without_a_proxy() -> None:
    variables = {"PATH": "/bin", "NO_PROXY": ".corp"}
    exempt_loopback_from_proxies(variables)
    assert variables == {"PATH": "/bin", "NO_PROXY": ".corp"}
