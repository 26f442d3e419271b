"""Changes valid bytes as a torn write, a flipped bit or an attacker would."""

import random
import zlib

NO_UTF8 = b"\xff"
_SNIPPETS = (
    b"\0" * 64,
    NO_UTF8 * 9,
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",  # msgpack: the largest number
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\xff\xff\xff\xff",  # bytes of as many
    b"\xcb\x7f\xf8\0\0\0\0\0\0",  # NaN
    b"\x91" * 3_000,
    b"[" * 30_000,
    b'{"a":' * 3_000,
    b"9" * 400,
    b"1e999",
    b"-9223372036854775809",
    b"NaN",
    b'"\\ud800"',
    b"\x1b]0;x\x07",
    b"\r\n",
    b"../../",
    b"TVB2",
    b"TVS2",
)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """Return the bytes with some changed, cut out, put in, doubled or cut off."""
    changed = bytearray(raw or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed))
        kind = rng.randrange(8)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF))
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 8)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 8))
        elif kind == 4:
            snippet = rng.choice(_SNIPPETS)
            changed[at : at + rng.choice((0, len(snippet)))] = snippet
        elif kind == 5:
            part = bytes(changed[at : at + rng.randrange(1, 64)])
            changed[at:at] = part * rng.choice((1, 2, 50))
        elif kind == 6:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            size = rng.choice((1, 2, 4, 8))
            changed[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        else:
            del changed[at:]
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def sealed(raw: bytes) -> bytes:
    """Return a batch whose lengths and checksum hold again, whatever was done to its content."""
    raw = raw.ljust(44, b"\0")
    body = int.from_bytes(raw[12:16], "little")
    if body <= len(raw) - 44:
        raw = raw[:8] + (len(raw) - 44 - body).to_bytes(4, "little") + raw[12:]
    return raw[:4] + zlib.crc32(raw[8:]).to_bytes(4, "little") + raw[8:]
