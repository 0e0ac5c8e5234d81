"""Tokens signed the way Google signs them, with a test key whose certificate is on a local
server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from google.auth import jwt
from google.auth.crypt import RSASigner

AUDIENCE, ACCOUNT, KEY_ID = (
    "https://dead-letters.example",
    "push@p.iam.gserviceaccount.com",
    "key-1",
)


class Issuer:
    """Signs tokens."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    @property
    def key(self) -> str:
        kind = serialization.PrivateFormat.TraditionalOpenSSL
        return self._key.private_bytes(
            serialization.Encoding.PEM, kind, serialization.NoEncryption()
        ).decode()

    @property
    def certificate(self) -> str:
        name, now = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer")]),
            datetime.now(UTC),
        )
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .sign(self._key, hashes.SHA256())
        )
        return built.public_bytes(serialization.Encoding.PEM).decode()

    def token(self, **claims: object) -> str:
        now_s = int(time.time())
        usual = {
            "aud": AUDIENCE,
            "email": ACCOUNT,
            "email_verified": True,
            "iss": "https://accounts.google.com",
            "iat": now_s,
            "exp": now_s + 600,
        }
        signed: bytes = jwt.encode(RSASigner.from_string(self.key, KEY_ID), usual | claims)
        return signed.decode()


@contextmanager
def certificates_of(issuer: Issuer) -> Iterator[tuple[str, list[str]]]:
    """The URL of a server that serves the issuer's certificate, and the requests it received."""
    body, asked = json.dumps({KEY_ID: issuer.certificate}).encode(), list[str]()

    class Show(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Keeps request logs out of the output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Show) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/certs", asked
        finally:
            server.shutdown()
            thread.join(5)
