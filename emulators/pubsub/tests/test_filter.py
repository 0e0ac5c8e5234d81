"""The filter language: what each expression matches, and every reason an expression is rejected."""

from collections.abc import Mapping

import pytest

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.state.filter import AllOf, Equals, parse_filter
from tests.world import World, message, subscription_path

MESSAGES: dict[int, dict[str, str]] = {
    1: {"lang": "en", "name": "com", "timezone": "UTC"},
    2: {"lang": "en", "name": "net", "timezone": "UTC"},
    3: {"lang": "en", "name": "org", "timezone": "UTC"},
    4: {"lang": "cn", "name": "com", "timezone": "UTC"},
    5: {"lang": "cn", "name": "net", "timezone": "UTC"},
    6: {"lang": "cn", "name": "org", "timezone": "UTC"},
    7: {"lang": "jp", "name": "co", "timezone": "UTC"},
    8: {"lang": "jp", "timezone": "UTC"},
    9: {"name": "com", "timezone": "UTC"},
    10: {"lang": "jp", "みんな": "dummy1"},
    11: {"みんな": "dummy2"},
    12: {"name": "com", "みんな": "dummy3"},
}


def kept(text: str) -> list[int]:
    tree = parse_filter(text)
    return [
        number
        for number, attributes in MESSAGES.items()
        if tree is None or tree.matches(attributes)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('attributes.name = "com"', [1, 4, 9, 12]),
        ('attributes.name != "com"', [2, 3, 5, 6, 7, 8, 10, 11]),
        ('hasPrefix(attributes.name, "co")', [1, 4, 7, 9, 12]),
        ("attributes:name", [1, 2, 3, 4, 5, 6, 7, 9, 12]),
        ("NOT attributes:name", [8, 10, 11]),
        ('(NOT attributes:name) OR attributes.name = "co"', [7, 8, 10, 11]),
        ('NOT (attributes:name OR attributes.lang = "jp")', [11]),
        ('attributes.name = "com" AND -attributes:"lang"', [9, 12]),
        (r'attributes:"\u307F\u3093\u306A"', [10, 11, 12]),
        ('attributes:"みんな"', [10, 11, 12]),
        (r'attributes:"\xe3\x81\xbf\xe3\x82\x93\xe3\x81\xaa"', [10, 11, 12]),
        (r'attributes:"\343\201\277\343\202\223\343\201\252"', [10, 11, 12]),
        (r'attributes:"\U0000307F\u3093\u306A"', [10, 11, 12]),
        ("", list(MESSAGES)),
        ("   ", list(MESSAGES)),
        ('attributes.lang="en" AND attributes.name="com" AND attributes:timezone', [1]),
        (
            'attributes.name = "co" OR attributes.name = "net" OR attributes.name = "org"',
            [2, 3, 5, 6, 7],
        ),
        ('attributes.lang = "jp" AND (attributes:name OR NOT attributes:timezone)', [7, 10]),
        ('((attributes.name = "co"))', [7]),
        ("-(attributes:lang)", [9, 11, 12]),
        ('attributes . name\n=\t"co"', [7]),
        ('hasPrefix(attributes.name, "")', [1, 2, 3, 4, 5, 6, 7, 9, 12]),
        ('attributes.name = "COM"', []),
        ('attributes.Name = "com"', []),
    ],
)
def test_filter_keeps(text: str, expected: list[int]) -> None:
    assert kept(text) == expected


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("attributes:AND", "AND"),
        ("attributes:NOT", "NOT"),
        ("attributes:attributes", "attributes"),
        ("attributes:a-b_c9", "a-b_c9"),
        ('attributes:"iana.org/language_tag"', "iana.org/language_tag"),
        (r'attributes:"quote\" backslash\\ tab\t"', 'quote" backslash\\ tab\t'),
    ],
)
def test_key_forms(text: str, key: str) -> None:
    tree = parse_filter(text)
    assert tree is not None
    assert tree.matches({key: ""})
    assert not tree.matches({key + "x": ""})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("attributes:a and attributes:b", "operators must be uppercase, got 'and' at column 14"),
        ("attributes:a or attributes:b", "operators must be uppercase, got 'or'"),
        ("not attributes:a", "operators must be uppercase, got 'not' at column 1"),
        ("attributes:a And attributes:b", "operators must be uppercase, got 'And'"),
        ("attributes:a AND attributes:b OR attributes:c", "can't be mixed without parentheses"),
        ("attributes:a OR attributes:b AND attributes:c", "can't be mixed without parentheses"),
        ('contains(attributes.a, "b")', "unknown function 'contains'"),
        ('hasprefix(attributes.a, "b")', "unknown function 'hasprefix'"),
        ('hasPrefix(attributes:a, "b")', "unexpected ':'"),
        ("hasPrefix(attributes.a)", "unexpected ')'"),
        ("attributes:\\u0041", "escapes are only allowed in string literals"),
        ("attributes.a = b", "unexpected 'b' at column 16"),
        ("attributes.a = 'b'", 'unexpected "\'"'),
        ("attributes.a", "unexpected end of expression"),
        ('attributes.a = "b" AND', "unexpected end of expression"),
        ("(attributes:a", "unexpected end of expression"),
        ("attributes:a)", "unexpected ')'"),
        ("()", "unexpected ')'"),
        ('attributes.a > "b"', "unexpected '>'"),
        ('name = "x"', "unexpected 'name'"),
        ('message.attributes.a = "b"', "unexpected 'message'"),
        ("NOTattributes:a", "unexpected 'NOTattributes'"),
        ("attributes:a ANDattributes:b", "unexpected 'ANDattributes'"),
        ("NOT NOT attributes:a", "unexpected 'NOT'"),
        ("AND", "each needs an expression on both sides"),
        ('attributes.a = "b', "unexpected '\"'"),
        ('attributes.a = "b\nc"', "unexpected '\"'"),
        (r'attributes.a = "\q"', r"unknown escape \q"),
        (r'attributes.a = "\u12"', r"unknown escape \u"),
        (r'attributes.a = "\ud800"', "is not a valid character"),
        (r'attributes.a = "\U00110000"', "is not a valid character"),
        (r'attributes.a = "\777"', "is not a valid byte"),
        (r'attributes.a = "\xff"', "are not valid UTF-8"),
        ("attributes:ключ", "unexpected"),
    ],
)
def test_filter_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse_filter(text)
    assert reason in str(refusal.value)
    assert f"(filter={text})" in str(refusal.value)


def test_256_bytes_are_the_limit() -> None:
    fits = 'attributes.k = "' + "v" * 239 + '"'
    assert len(fits) == 256
    assert parse_filter(fits) == Equals("k", "v" * 239)
    with pytest.raises(InvalidArgument, match="You passed 257 bytes"):
        parse_filter(fits + " ")


def test_limit_counts_bytes_not_characters() -> None:
    with pytest.raises(InvalidArgument, match="You passed 258 bytes"):
        parse_filter('attributes:"' + "み" * 81 + '"xx')


def test_deepest_nesting_that_fits_is_fine() -> None:
    tree = parse_filter("(" * 121 + "attributes:k" + ")" * 121)
    assert tree is not None
    assert tree.matches({"k": ""})


def test_filtered_subscription_gets_only_what_matches(world: World) -> None:
    world.subscription("slot-1", filter='attributes.slot = "1"')
    world.subscription("slot-2", filter='attributes.slot = "2"')
    world.subscription("prefixed", filter='hasPrefix(attributes.slot, "1")')
    world.publish(
        message("a", slot="1"), message("b", slot="2"), message("c", slot="11"), message("d")
    )
    assert world.pull_data("slot-1") == ["a"]
    assert world.pull_data("slot-2") == ["b"]
    assert world.pull_data("prefixed") == ["a", "c"]
    assert world.pull_data() == ["a", "b", "c", "d"]


def test_deleted_filtered_subscription_gets_nothing_and_its_neighbor_goes_on(world: World) -> None:
    world.subscription("first", filter='attributes.slot = "1"')
    world.subscription("second", filter='attributes.slot = "1"')
    path = subscription_path("first")
    world.call("DeleteSubscription", "DeleteSubscriptionRequest", subscription=path)
    world.publish(message("a", slot="1"))
    assert world.pull_data("second") == ["a"]


def test_filter_of_a_subscription_is_checked_when_it_is_made(world: World) -> None:
    with pytest.raises(InvalidArgument, match="Invalid filter"):
        world.subscription("wrong", filter="attributes")
    with pytest.raises(InvalidArgument, match="filter is too large"):
        world.subscription("long", filter="a" * 257)


def test_filter_of_a_deleted_subscription_is_forgotten(world: World) -> None:
    world.subscription("slot-1", filter='attributes.slot = "1"')
    path = subscription_path("slot-1")
    world.call("DeleteSubscription", "DeleteSubscriptionRequest", subscription=path)
    world.subscription("slot-2", filter='attributes.slot = "2"')
    world.publish(message("a", slot="1"), message("b", slot="2"))
    assert world.pull_data("slot-2") == ["b"]


def test_subscriptions_that_differ_in_one_condition_are_found_without_trying_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[AllOf] = []
    matches = AllOf.matches

    def counted(self: AllOf, attributes: Mapping[str, str]) -> bool:
        tried.append(self)
        return matches(self, attributes)

    monkeypatch.setattr(AllOf, "matches", counted)
    world = World()
    world.topic()
    for number in range(300):
        world.subscription(
            f"slot-{number}", filter=f'attributes.kind = "reply" AND attributes.slot = "{number}"'
        )
    world.publish(message("a", kind="reply", slot="7"), message("b", kind="job", slot="7"))
    assert len(tried) < 10
    assert [world.pull_data(f"slot-{number}") for number in (0, 7, 299)] == [[], ["a"], []]
    for number in range(300):
        path = subscription_path(f"slot-{number}")
        world.call("DeleteSubscription", "DeleteSubscriptionRequest", subscription=path)
    assert world.broker.registry.storage.held_bytes == 0
