"""The configuration of uvicorn, which tests use as well."""

from __future__ import annotations

import ssl

import uvicorn
from starlette.types import ASGIApp

from api.http.bounded_protocol import protocol_with
from shared.errors import ConfigurationError
from shared.settings import ApiSettings

DRAIN_S = 4
"""For open requests after SIGTERM. Cloud Run kills after 10 s, and rows take up to 5 s to be
stored."""
KEEP_ALIVE_S = 620
"""Above the 600 s of Google's load balancer. Otherwise it may reuse a connection that just
closed."""


def server_config(app: ASGIApp, settings: ApiSettings) -> uvicorn.Config:
    """Returns the configuration of the server.

    Raises:
        ConfigurationError: the certificate and its key can't be used.
    """
    context = _tls_context(settings) if settings.tls_cert else None
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol_with(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # Decides whether links are https. A Host that a proxy changed is not taken back from
        # X-Forwarded-Host, which Google's front end passes on as the caller wrote it.
        # PENSTOCK_PUBLIC_URL is for that.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        # uvicorn's own context has no list of ciphers; Python's leaves out what is broken.
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


def _tls_context(settings: ApiSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password: without one, a key that has one would ask the terminal for it.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as error:
        raise ConfigurationError(
            f"PENSTOCK_TLS_CERT: {settings.tls_cert} and {settings.tls_key} are not a certificate "
            f"and its key: {error.strerror or error}",
            field="tls_cert",
        ) from error
    return context
