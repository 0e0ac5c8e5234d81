"""Authenticates pushes using their OpenID Connect token, before the body is read.

https://cloud.google.com/pubsub/docs/authenticate-push-subscriptions: the signature and audience
prove that Google created the token for this service, but only the account proves that the request
came from our subscription.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections.abc import Mapping
from typing import Any, Literal

from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import Request
from google.oauth2.id_token import verify_token

from shared.errors import ConfigurationError, PenstockError, Unavailable

GOOGLE_CERTS_URL = "https://www.googleapis.com/oauth2/v1/certs"
ISSUERS = frozenset({"accounts.google.com", "https://accounts.google.com"})
CERTS_KEPT_S = 600.0
"""Google publishes a new key days before it starts signing with it."""
CLOCK_SKEW_S = 10
# Cloud Run replaces the signature with this text after checking it.
REMOVED_SIGNATURE = "SIGNATURE_REMOVED_BY_GOOGLE"


class PushRefused(PenstockError):
    """The caller is not allowed to make this call."""

    code = "push_refused"
    public_by_default = None


class PushAuthenticator:
    """Admits calls from a single account.

    Args:
        audience: the tokens' expected audience. If empty, nothing is checked, as on a single
            machine.
        certs_url: URL of the signers' certificates.
        checked_by: `us`, or `cloud-run` if the service requires roles/run.invoker. Cloud Run checks
            signatures and removes them from tokens.

    Raises:
        ConfigurationError: there is an audience, but no account.
    """

    def __init__(
        self,
        audience: str,
        account: str,
        *,
        certs_url: str = GOOGLE_CERTS_URL,
        checked_by: Literal["us", "cloud-run"] = "us",
    ) -> None:
        if audience and not account:
            raise ConfigurationError(
                "PENSTOCK_PUSH_ACCOUNT: is required if an audience is set", field="push_account"
            )
        self._audience = audience
        self._account = account
        self._certs_url = certs_url
        self._checked_by = checked_by
        self._certs = _CachedCerts()

    async def check(self, authorization: str) -> None:
        """Checks a call's Authorization header.

        Raises:
            PushRefused: the token is missing or invalid.
            Unavailable: the signers' certificates are unreachable.
        """
        if not self._audience:
            return
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise PushRefused("the token is missing")
        try:
            if self._checked_by == "cloud-run" and token.endswith(f".{REMOVED_SIGNATURE}"):
                claims = _read_unverified_claims(token)
            else:
                claims = await asyncio.to_thread(self._verify_claims, token)
        except TransportError as error:
            raise Unavailable(f"certificates: {error}") from error
        except (GoogleAuthError, ValueError, RecursionError) as error:
            raise PushRefused(f"the token is invalid: {error}") from error
        self._check_claims(claims)

    def _verify_claims(self, token: str) -> Mapping[str, Any]:
        claims: Mapping[str, Any] = verify_token(
            token,
            self._certs,
            audience=self._audience,
            certs_url=self._certs_url,
            clock_skew_in_seconds=CLOCK_SKEW_S,
        )
        return claims

    def _check_claims(self, claims: Mapping[str, Any]) -> None:
        wanted = {"aud": self._audience, "email": self._account, "email_verified": True}
        wrong = [name for name, value in wanted.items() if claims.get(name) != value]
        wrong += [] if claims.get("iss") in ISSUERS else ["iss"]
        expires_s = claims.get("exp")
        if not isinstance(expires_s, int | float) or expires_s + CLOCK_SKEW_S < time.time():
            wrong.append("exp")
        if wrong:
            raise PushRefused(f"the token is not for this service: {', '.join(wrong)}")


def _read_unverified_claims(token: str) -> Mapping[str, Any]:
    try:
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    except (IndexError, binascii.Error) as error:
        raise ValueError(str(error)) from error
    if not isinstance(claims, dict):
        raise ValueError("the token's claims are not an object")
    return claims


class _CachedCerts:
    """Fetches and caches certificates for google-auth, which would fetch them for every token."""

    def __init__(self) -> None:
        self._request: Any = None
        self._cached_answer: tuple[float, Any] | None = None

    def __call__(self, url: str, method: str = "GET", **options: Any) -> Any:
        if self._cached_answer is None or time.monotonic() - self._cached_answer[0] > CERTS_KEPT_S:
            self._request = self._request or Request()
            answer = self._request(url, method=method, **options)
            if answer.status != 200:
                return answer
            self._cached_answer = time.monotonic(), answer
        return self._cached_answer[1]
