"""Connects real programs to the stand-in for Google: a proxy has a certificate for every host, so
that `gcloud`, Terraform and our own code keep the addresses they use in the cloud. Nothing gets
out: requests unknown to the stand-in are rejected.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.infra.release.api import Ask, Reply
from tests.infra.release.cloud import Cloud

HOSTS = ("*.googleapis.com", "*.pkg.dev", "*.run.app", "*.europe-west4.run.app")


@contextmanager
def proxy(cloud: Cloud, folder: Path) -> Iterator[tuple[str, Path]]:
    """Serves `cloud` behind a proxy.

    Yields the proxy's URL, and the certificate authority that clients must trust.
    """
    authority, pair = _certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    handler = type("Handler", (_Proxy,), {"cloud": cloud, "context": context})
    with _serving(handler) as url:
        yield url, authority


@contextmanager
def metadata_server(project: str, account: str, token: str) -> Iterator[str]:
    """The server from which a Cloud Build step requests its identity. Yields host and port."""
    answers = {
        "/": "computeMetadata/",
        "/computeMetadata/v1/project/project-id": project,
        "/computeMetadata/v1/instance/service-accounts/default/email": account,
        "/computeMetadata/v1/instance/service-accounts/default/": json.dumps(
            {"email": account, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}
        ),
        "/computeMetadata/v1/instance/service-accounts/default/token": json.dumps(
            {"access_token": token, "expires_in": 3000, "token_type": "Bearer"}
        ),
        "/computeMetadata/v1/universe/universe-domain": "googleapis.com",
    }

    class Handler(_Quiet):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            path = path.replace(f"/{account}", "/default")
            found = answers.get(path)
            body = (found or "not found").encode()
            kind = "application/json" if body.startswith(b"{") else "text/plain"
            self.send_response(404 if found is None else 200)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with _serving(Handler) as url:
        yield url.removeprefix("http://")


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Proxy(_Quiet):
    """Responds for every host, on connections that clients believe go to that host."""

    cloud: Cloud
    context: ssl.SSLContext
    host = ""

    def do_CONNECT(self) -> None:
        self.host = self.path.partition(":")[0]
        self.send_response(200, "Connection established")
        self.end_headers()
        self.connection = self.context.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        token = headers.get("authorization", "").removeprefix("Bearer ")
        ask = Ask(
            self.cloud.tokens.get(token, "nobody"),
            self.command,
            self.host or parts.hostname or "",
            parts.path,
            {name: values[0] for name, values in parse_qs(parts.query).items()},
            self._body(headers),
            headers,
        )
        self._send(self.cloud.answer(ask))

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_GET

    def finish(self) -> None:
        """Also closes the TLS socket, because the server itself closes only its own."""
        super().finish()
        self.connection.close()

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(headers.get("content-length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.status != 204:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores client disconnects, which don't matter to the test."""


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _certificates(folder: Path) -> tuple[Path, Path]:
    """Creates a certificate authority, plus a certificate and key that cover all hosts.

    Returns PEM file paths.
    """
    now = datetime.now(UTC)

    def builder(
        name: str, issuer: str
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.CertificateBuilder]:
        key = ec.generate_private_key(ec.SECP256R1())
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=1))
        )
        return key, made

    root_key, root = builder("tests", "tests")
    identifier = x509.SubjectKeyIdentifier.from_public_key(root_key.public_key())
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    signed_root = (
        root.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(usage, critical=True)
        .sign(root_key, hashes.SHA256())
    )
    key, leaf = builder("google", "tests")
    names = x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS])
    signed = (
        leaf.add_extension(names, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(root_key, hashes.SHA256())
    )
    authority, pair = folder / "authority.pem", folder / "google.pem"
    authority.write_bytes(signed_root.public_bytes(Encoding.PEM))
    pair.write_bytes(
        signed.public_bytes(Encoding.PEM)
        + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return authority, pair
