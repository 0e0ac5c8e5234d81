"""The format of an API key: `pk_live_<id>_<secret><checksum>`.

    pk_live_4fJ0aQz81LmN_ + 43 characters of secret + 6 of checksum

The parts are modeled on GitHub's tokens
(https://github.blog/engineering/platform-security/behind-githubs-new-authentication-token-formats/).
The prefix lets scanners find leaked keys. The checksum is the CRC32 of everything before it, in
base62, so a typo is rejected without a lookup, and scanners can distinguish a key from a random
string. The ID is public and identifies the key in logs and commands. The secret has 256 random
bits.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

PREFIX = "pk_live_"
ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
ID_LENGTH = 12
SECRET_LENGTH = 43
"""62 to the 43rd power is greater than 2 to the 256th."""
CHECKSUM_LENGTH = 6
SALT_BYTES = 16
PATTERN = rf"pk_live_[0-9A-Za-z]{{{ID_LENGTH}}}_[0-9A-Za-z]{{{SECRET_LENGTH + CHECKSUM_LENGTH}}}"
"""A regular expression that matches a key, for scanners."""
ID_PATTERN = rf"[0-9A-Za-z]{{{ID_LENGTH}}}"
_SHAPE = re.compile(PATTERN)
_IN_TEXT = re.compile(rf"({PREFIX}{ID_PATTERN}_)[0-9A-Za-z]+")
_ID_END = len(PREFIX) + ID_LENGTH


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key with a correct checksum. The API may still reject it."""

    id: str
    text: str = field(repr=False)
    """The whole key. It must not be logged or stored."""


def new_key(key_id: str = "") -> ApiKey:
    """Creates a key with a new secret, and a new ID unless one is passed."""
    key_id = key_id or _random(ID_LENGTH)
    return key_of(key_id, _random(SECRET_LENGTH))


def key_of(key_id: str, secret: str) -> ApiKey:
    """Returns the key with this ID and secret."""
    start = f"{PREFIX}{key_id}_{secret}"
    return ApiKey(key_id, start + checksum(start))


def parse_key(text: str) -> ApiKey | None:
    """Returns the key, or None if `text` is not a key or has a typo."""
    if _SHAPE.fullmatch(text) is None:
        return None
    if checksum(text[:-CHECKSUM_LENGTH]) != text[-CHECKSUM_LENGTH:]:
        return None
    return ApiKey(text[len(PREFIX) : _ID_END], text)


def checksum(text: str) -> str:
    """Returns the CRC32 of `text` (ASCII) as six base62 digits."""
    number, digits = zlib.crc32(text.encode("ascii")), ""
    for _ in range(CHECKSUM_LENGTH):
        number, digit = divmod(number, len(ALPHABET))
        digits = ALPHABET[digit] + digits
    return digits


def hash_of(salt: bytes, key: ApiKey) -> bytes:
    """Returns the value that is stored in place of the key: SHA-256 of the salt and key.

    Slow hashes are for passwords, which can be guessed; 256 random bits can't be.
    """
    return hashlib.sha256(salt + key.text.encode("ascii")).digest()


def without_keys(text: str) -> str:
    """Returns `text` with all key secrets, whole or truncated, removed. Key IDs are kept."""
    return _IN_TEXT.sub(r"\1…", text) if PREFIX in text else text


def holds_key(text: str) -> bool:
    """Returns whether `text` contains a key or the start of a key's secret. An ID is not a key."""
    return PREFIX in text and _IN_TEXT.search(text) is not None


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))
