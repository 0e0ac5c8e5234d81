"""Only the subscription's account may call, using a token that Google signed for us."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Literal

import httpx
import pytest

from infra.local.process import free_port
from shared.errors import ConfigurationError, Unavailable
from tests.workers.functions.tokens import ACCOUNT, AUDIENCE, Issuer, certificates_of
from workers.functions.push_auth import REMOVED_SIGNATURE, PushAuthenticator, PushRefused

pytestmark = pytest.mark.anyio


@pytest.fixture
def certs(issuer: Issuer) -> Iterator[tuple[str, list[str]]]:
    with certificates_of(issuer) as shown:
        yield shown


async def test_right_tokens_pass_and_certificates_are_kept(
    issuer: Issuer, certs: tuple[str, list[str]]
) -> None:
    caller = PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=certs[0])
    await caller.check(f"Bearer {issuer.token()}")
    await caller.check(f"bearer {issuer.token(iss='accounts.google.com')}")
    assert len(certs[1]) == 1


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "https://another.example"},
        {"email": "someone@else.example"},
        {"email_verified": False},
        {"iss": "https://issuer.example"},
        {"iat": time.time() - 4000, "exp": time.time() - 400},
    ],
    ids=lambda claims: next(iter(claims)),
)
@pytest.mark.parametrize("checked_by", ["us", "cloud-run"])
async def test_other_claims_are_refused(
    issuer: Issuer, certs: tuple[str, list[str]], claims: dict[str, object], checked_by: str
) -> None:
    caller = PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=certs[0], checked_by=checked_by)  # type: ignore[arg-type]
    token = issuer.token(**claims)
    if checked_by == "cloud-run":
        token = _stripped(token)
    with pytest.raises(PushRefused):
        await caller.check(f"Bearer {token}")


def _nested() -> str:
    return base64.urlsafe_b64encode(b"[" * 30_000).decode()


@pytest.mark.parametrize(
    "token",
    [f"{_nested()}.e30.e30", f"e30.{_nested()}.e30", f"e30.{_nested()}.{REMOVED_SIGNATURE}"],
)
@pytest.mark.parametrize("checked_by", ["us", "cloud-run"])
async def test_token_that_is_nested_without_end_is_refused(
    certs: tuple[str, list[str]], token: str, checked_by: Literal["us", "cloud-run"]
) -> None:
    with pytest.raises(PushRefused):
        await PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=certs[0], checked_by=checked_by).check(
            f"Bearer {token}"
        )


@pytest.mark.parametrize(
    "authorization", ["", "Bearer ", "Basic dTpw", "Bearer a.b.c", "Bearer nonsense"]
)
async def test_no_token_is_refused(certs: tuple[str, list[str]], authorization: str) -> None:
    with pytest.raises(PushRefused):
        await PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=certs[0]).check(authorization)


async def test_tokens_of_others_are_refused(certs: tuple[str, list[str]]) -> None:
    with pytest.raises(PushRefused):
        await PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=certs[0]).check(
            f"Bearer {Issuer().token()}"
        )


async def test_signature_may_be_missing_only_behind_cloud_run(
    issuer: Issuer, certs: tuple[str, list[str]]
) -> None:
    token = _stripped(issuer.token())
    await PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=certs[0], checked_by="cloud-run").check(
        f"Bearer {token}"
    )
    with pytest.raises(PushRefused):
        await PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=certs[0]).check(f"Bearer {token}")


def _stripped(token: str) -> str:
    return token.rpartition(".")[0] + f".{REMOVED_SIGNATURE}"


async def test_without_certificates_nobody_is_judged(issuer: Issuer) -> None:
    caller = PushAuthenticator(AUDIENCE, ACCOUNT, certs_url=f"http://127.0.0.1:{free_port()}/certs")
    with pytest.raises(Unavailable):
        await caller.check(f"Bearer {issuer.token()}")


def test_audience_needs_an_account() -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_PUSH_ACCOUNT"):
        PushAuthenticator(AUDIENCE, "")


async def test_function_asks_who_calls(issuer: Issuer, guarded_url: str) -> None:
    push = {"message": {"messageId": "1"}, "subscription": "projects/p/subscriptions/s"}
    async with httpx.AsyncClient(base_url=guarded_url) as client:
        nobody = await client.post("/dead_letter", json=push)
        other, ours = [
            await client.post(
                "/dead_letter", json=push, headers={"authorization": f"Bearer {signer.token()}"}
            )
            for signer in (Issuer(), issuer)
        ]
    # The message is invalid, so it is acknowledged. Only the caller's identity was tested.
    assert [answer.status_code for answer in (nobody, other, ours)] == [401, 401, 204]
