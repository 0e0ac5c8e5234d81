"""The API with its own certificate, and certificates that it rejects at startup."""

import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from api.server import server_config
from shared.errors import ConfigurationError
from shared.settings import ApiSettings, read_settings
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.limits import WAIT_LIMIT_S
from tests.tls import make_certificate

pytestmark = pytest.mark.anyio
BODY = {"model": TEXT_MODEL.name, "input": "a"}


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that is never called."""


async def test_requests_are_answered_over_tls(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    settings = settings_for(tmp_path, tls_cert=str(made.cert), tls_key=str(made.key))
    trusting = ssl.create_default_context(cafile=str(made.cert))
    async with AsyncExitStack() as opened:
        api: ApiUnderTest = await opened.enter_async_context(running_api(settings))
        url = api.url.replace("http:", "https:")
        http = await opened.enter_async_context(
            httpx.AsyncClient(base_url=url, verify=trusting, timeout=WAIT_LIMIT_S)
        )
        answer = await http.post("/v1/embeddings", json=BODY)
        assert answer.status_code == 200, answer.text
        with pytest.raises(httpx.RemoteProtocolError):
            await api.http.get("/healthz")  # without TLS


def handshake_error(client: ssl.SSLContext, server: ssl.SSLContext) -> str:
    """The error that either side reports for an in-memory handshake. Empty if it succeeds."""
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            return error.reason
    return ""


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1:DeprecationWarning")
@pytest.mark.parametrize(
    ("ciphers", "newest", "reason"),
    [
        ("ECDHE+AESGCM", ssl.TLSVersion.TLSv1_3, ""),
        ("ECDHE+AESGCM", ssl.TLSVersion.TLSv1_2, ""),
        ("ECDHE-RSA-AES128-SHA256:ECDHE-ECDSA-AES128-SHA256", ssl.TLSVersion.TLSv1_2, ""),
        ("ECDHE-RSA-AES128-SHA:ECDHE-ECDSA-AES128-SHA", ssl.TLSVersion.TLSv1_2, "NO_SHARED_CIPHER"),
        ("ALL", ssl.TLSVersion.TLSv1_1, "UNSUPPORTED_PROTOCOL"),
    ],
)
def test_old_protocols_and_ciphers_are_refused(
    tmp_path: Path, ciphers: str, newest: ssl.TLSVersion, reason: str
) -> None:
    made = make_certificate(tmp_path)
    settings = settings_for(tmp_path, tls_cert=str(made.cert), tls_key=str(made.key))
    config = server_config(no_app, settings)
    config.load()
    assert isinstance(config.ssl, ssl.SSLContext)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.set_ciphers(f"@SECLEVEL=0:{ciphers}")
    client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1, newest
    assert handshake_error(client, config.ssl) == reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tls_cert": "{cert}"}, "PENSTOCK_TLS_KEY: .*must be set together"),
        ({"tls_key": "{key}"}, "PENSTOCK_TLS_KEY: .*must be set together"),
        (
            {"tls_cert": "{cert}", "tls_key": "/no/key.pem"},
            "PENSTOCK_TLS_CERT: .*/no/key.pem are not a valid certificate .*: No such file",
        ),
        ({"tls_cert": "{key}", "tls_key": "{key}"}, "PENSTOCK_TLS_CERT: .*not a valid certificate"),
        (
            {"tls_cert": "{cert}", "tls_key": "{locked}"},
            "PENSTOCK_TLS_CERT: .*not a valid certificate",
        ),
    ],
)
def test_wrong_certificate_is_refused_by_name(
    tmp_path: Path, given: dict[str, str], reason: str
) -> None:
    made = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    locked = make_certificate(tmp_path / "other", password=b"secret").key
    paths = {
        name: path.format(cert=made.cert, key=made.key, locked=locked)
        for name, path in given.items()
    }
    with pytest.raises(ConfigurationError, match=reason):
        server_config(no_app, read_settings(ApiSettings, **paths))
