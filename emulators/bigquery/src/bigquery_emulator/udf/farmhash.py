"""FARM_FINGERPRINT: FarmHash's `Fingerprint64`.

The bindings on PyPI have wheels only for x86-64 and a few Python versions, so this module
implements the one function we need. It uses the names from the source: `farmhashna::Hash64` in
https://github.com/google/farmhash.
"""

from __future__ import annotations

_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_MASK = 2**64 - 1
_SIGN = 2**63


def fingerprint64(data: bytes) -> int:
    """Returns the fingerprint of a byte string as an INT64."""
    size = len(data)
    if size <= 16:
        digest = _hash_0_to_16(data, size)
    elif size <= 32:
        digest = _hash_17_to_32(data, size)
    elif size <= 64:
        digest = _hash_33_to_64(data, size)
    else:
        digest = _hash_long(data, size)
    return (digest & _MASK ^ _SIGN) - _SIGN


def _fetch(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _fetch32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _rotate(value: int, shift: int) -> int:
    value &= _MASK
    return value >> shift | value << (64 - shift) & _MASK


def _shift_mix(value: int) -> int:
    value &= _MASK
    return value ^ value >> 47


def _hash_16(u: int, v: int, mul: int) -> int:
    a = _shift_mix((u ^ v) * mul)
    return _shift_mix(((v ^ a) & _MASK) * mul) * mul & _MASK


def _hash_0_to_16(data: bytes, size: int) -> int:
    mul = _K2 + size * 2
    if size >= 8:
        a, b = _fetch(data, 0) + _K2, _fetch(data, size - 8)
        c = _rotate(b, 37) * mul + a
        d = (_rotate(a, 25) + b) * mul
        return _hash_16(c & _MASK, d & _MASK, mul)
    if size >= 4:
        return _hash_16(size + (_fetch32(data, 0) << 3), _fetch32(data, size - 4), mul)
    if size:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[-1] << 2)
        return _shift_mix(y * _K2 ^ z * _K0) * _K2
    return _K2


def _hash_17_to_32(data: bytes, size: int) -> int:
    mul = _K2 + size * 2
    a, b = _fetch(data, 0) * _K1, _fetch(data, 8)
    c, d = _fetch(data, size - 8) * mul, _fetch(data, size - 16) * _K2
    u = _rotate(a + b, 43) + _rotate(c, 30) + d
    return _hash_16(u & _MASK, a + _rotate(b + _K2, 18) + c & _MASK, mul)


def _hash_33_to_64(data: bytes, size: int) -> int:
    mul = _K2 + size * 2
    a, b = _fetch(data, 0) * _K2, _fetch(data, 8)
    c, d = _fetch(data, size - 8) * mul, _fetch(data, size - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d & _MASK
    z = _hash_16(y, a + _rotate(b + _K2, 18) + c & _MASK, mul)
    e, f = _fetch(data, 16) * mul, _fetch(data, 24)
    g, h = (y + _fetch(data, size - 32)) * mul, (z + _fetch(data, size - 24)) * mul
    u = _rotate(e + f, 43) + _rotate(g, 30) + h
    return _hash_16(u & _MASK, e + _rotate(f + a, 18) + g & _MASK, mul)


def _weak_hash(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_fetch(data, at + place) for place in (0, 8, 16, 24))
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    return a + z & _MASK, b + _rotate(a, 44) + c & _MASK


def _hash_long(data: bytes, size: int) -> int:
    x, y = 81, 81 * _K1 + 113
    z = _shift_mix(y * _K2 + 113) * _K2
    v = w = (0, 0)
    x = x * _K2 + _fetch(data, 0)
    for at in range(0, (size - 1) // 64 * 64, 64):
        x, y, z, v, w = _round(data, at, x, y, z, v, w, _K1, 1)
    mul = _K1 + ((z & 0xFF) << 1)
    w = (w[0] + ((size - 1) & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x, y, z, v, w = _round(data, size - 64, x, y, z, v, w, mul, 9)
    return _hash_16(
        _hash_16(v[0], w[0], mul) + _shift_mix(y) * _K0 + z & _MASK,
        _hash_16(v[1], w[1], mul) + x & _MASK,
        mul,
    )


def _round(
    data: bytes,
    at: int,
    x: int,
    y: int,
    z: int,
    v: tuple[int, int],
    w: tuple[int, int],
    mul: int,
    nine: int,
) -> tuple[int, int, int, tuple[int, int], tuple[int, int]]:
    """Adds 64 bytes. The last 64 bytes use a factor of 9 in two places."""
    x = _rotate(x + y + v[0] + _fetch(data, at + 8), 37) * mul & _MASK
    y = _rotate(y + v[1] + _fetch(data, at + 48), 42) * mul & _MASK
    x ^= w[1] * nine & _MASK
    y = y + v[0] * nine + _fetch(data, at + 40) & _MASK
    z = _rotate(z + w[0], 33) * mul & _MASK
    v = _weak_hash(data, at, v[1] * mul, x + w[0])
    w = _weak_hash(data, at + 32, z + w[1], y + _fetch(data, at + 16))
    return z, y, x, v, w
