"""A webhook that can never be delivered is rejected before anything is accepted or computed."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from shared.webhooks.event import WebhookUrlForbidden, parse_webhook_url
from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.api.predicting import TEXT

pytestmark = pytest.mark.anyio
UNDELIVERABLE = [
    "http://receiver.example/hook",
    "https://",
    "https://:443/hook",
    "https://receiver.example:0/",
    "https://receiver.example:99999/",
    "https://[::1/hook",
    "https://user:secret@receiver.example/",
    "https://key@receiver.example/",
    "https://127.0.0.1/",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f.1/",
    "https://\uff11\uff12\uff17.0.0.1/",
    "https://10.0.0.1:8443/",
    "https://169.254.169.254/computeMetadata/v1/",
    "https://[::1]/",
    "https://[::ffff:10.0.0.1]/",
    "https://[fe80::1%25eth0]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[fec0::1]/",
    "https://localhost/",
    "https://LOCALHOST./",
    "https://app.localhost/",
    "https://receiver/",
    "https://receiver./",
    "https://receiver..example/",
    "https://-receiver.example/",
    "https://receiver-.example/",
    f"https://{'a' * 64}.example/",
    f"https://{'a.' * 127}example/",
    "https://1.2.3.400/",
    "https://1.2.3.4.5/",
    "https://receiver.123/",
    "https://receiver.invalid/",
    "https://receiver.LOCAL/",
    "https://metadata.google.internal/computeMetadata/v1/",
    "https://router.home.arpa/",
    "https://abcdef.onion/",
]


api = api_with_redis(secret="s")


@pytest.mark.parametrize("name", ["webhook", "webhook_completed"])
async def test_undeliverable_webhooks_are_refused_by_field_and_reason(
    api: ApiUnderTest, name: str
) -> None:
    for url in UNDELIVERABLE:
        response = await api.http.post("/v1/predictions", json=TEXT | {name: url})
        assert response.status_code == 422, url
        (wrong,) = response.json()["invalid_fields"]
        assert (wrong["field"], bool(wrong["description"])) == (name, True)
    assert not api.worker.jobs
    assert (await api.http.get("/v1/predictions")).json()["results"] == []


@pytest.mark.parametrize(
    "url",
    [
        "https://receiver.example/hook?a=b",
        "https://93.184.216.34:8443/",
        "https://my_hook.receiver.example./",
        "https://b\u00fccher.example/",
        f"https://{'a' * 63}.example/",
        "https://[2606:2800:220:1::1]/",
    ],
)
async def test_others_are_taken(api: ApiUnderTest, url: str) -> None:
    assert (await api.http.post("/v1/predictions", json=TEXT | {"webhook": url})).status_code == 201


async def test_one_machine_takes_its_own(tmp_path: Path, redis_url: str) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url, webhooks_private=True)
    async with running_api(settings) as api:
        for url, status in (
            ("http://127.0.0.1:9000/hook", 201),
            ("http://a:b@127.0.0.1:9000/", 422),
            ("http://receiver:9000/hook", 201),
            ("http://receiver.internal/hook", 201),
            ("http://receiver..internal/hook", 422),
        ):
            assert (
                await api.http.post("/v1/predictions", json=TEXT | {"webhook": url})
            ).status_code == status


HOSTS = st.text(alphabet="0123456789abcdefx.:[]%@\uff11\u3002-", max_size=30)


@given(url=st.one_of(st.text(), st.builds("https://{}".format, st.one_of(st.text(), HOSTS))))
@example(url="https://xn--/")
def test_any_url_is_judged_one_way_or_the_other(url: str) -> None:
    try:
        judged = parse_webhook_url(url, allow_private=False)
    except WebhookUrlForbidden:
        return
    assert isinstance(judged, URL)
    assert judged.scheme == "https"
    assert judged.host
