"""The client's connections: endpoints, and TLS with credentials as for the real service."""

import asyncio
import datetime
import ipaddress
import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from shared.broker.pubsub.channel import GOOGLE_ENDPOINT, CallTarget, parse_endpoint
from shared.broker.pubsub.client import PubSubTransport
from shared.errors import ConfigurationError
from tests.shared.scripted_pubsub import scripted_pubsub

PUBLISH_ONCE = """
import asyncio, sys
from shared.broker.pubsub.client import PubSubTransport
async def main():
    async with PubSubTransport("p", sys.argv[1]) as transport:
        print(await transport.publish("t", b"1", {}, timeout_s=8))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("endpoint", "parsed"),
    [
        ("", CallTarget(GOOGLE_ENDPOINT, True)),
        (
            "us-east1-pubsub.googleapis.com:443",
            CallTarget("us-east1-pubsub.googleapis.com:443", True),
        ),
        (
            "pubsub.us-east1.rep.googleapis.com",
            CallTarget("pubsub.us-east1.rep.googleapis.com:443", True),
        ),
        ("localhost:8085", CallTarget("localhost:8085", False)),
        ("http://localhost:8085/", CallTarget("localhost:8085", False)),
        ("https://pubsub.internal", CallTarget("pubsub.internal:443", True)),
        ("[::1]:8085", CallTarget("[::1]:8085", False)),
        ("unix:///tmp/p/pubsub", CallTarget("unix:/tmp/p/pubsub", False)),
    ],
)
def test_endpoint_says_how_to_connect(endpoint: str, parsed: CallTarget) -> None:
    assert parse_endpoint(endpoint) == parsed


@pytest.mark.parametrize(
    "endpoint",
    [
        *(":8085", "ftp://localhost:8085", "http://", "unix://pubsub"),
        *("localhost/path", "http://localhost:8085/v1", "localhost/path:8085"),
    ],
)
def test_endpoint_without_host_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_endpoint(endpoint)


@pytest.mark.anyio
async def test_tls_carries_the_credentials_of_the_machine(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = _certificate(key)
    (tmp_path / "roots.pem").write_bytes(certificate)
    (tmp_path / "account.json").write_text(_service_account(key_pem))
    async with scripted_pubsub(grpc.ssl_server_credentials([(key_pem, certificate)])) as script:
        # A separate process, because gRPC reads its root certificates once per process.
        environment = {
            "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "account.json"),
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(tmp_path / "roots.pem"),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PUBLISH_ONCE, script.endpoint),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        output, errors = await process.communicate()
    assert output.split() == [b"1"], errors.decode()
    assert script.metadata[0]["authorization"].startswith("Bearer ey")


@pytest.mark.anyio
async def test_google_without_credentials_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nothing.json"))
    with pytest.raises(
        ConfigurationError, match=r"no Google credentials found for pubsub\.googleapis\.com"
    ):
        await PubSubTransport("p").__aenter__()


def _certificate(key: rsa.RSAPrivateKey) -> bytes:
    name, now = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]),
        datetime.datetime.now(datetime.UTC),
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return built.public_bytes(serialization.Encoding.PEM)


def _service_account(key_pem: bytes) -> str:
    return json.dumps(
        {
            "type": "service_account",
            "project_id": "p",
            "private_key_id": "1",
            "private_key": key_pem.decode(),
            "client_email": "penstock@p.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": "https://oauth2.googleapis.com/token",
        }
    )
