"""A deterministic mutation fuzzer: the same seed gives the same damage on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator


def mutations(bodies: list[bytes], count: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield `count` damaged versions, each with the number of the body it was made from; equal
    bytes are left out."""
    dice = random.Random(seed)
    made = 0
    while made < count:
        number = dice.randrange(len(bodies))
        body = bytearray(bodies[number])
        for _ in range(dice.choice((1, 1, 1, 2, 4))):
            _damage(body, dice, bodies)
        if bytes(body) != bodies[number]:
            made += 1
            yield number, bytes(body)


def _damage(body: bytearray, dice: random.Random, others: list[bytes]) -> None:
    place = dice.randrange(len(body) + 1)
    length = dice.choice((1, 2, 4, 8, 16, 100))
    kind = dice.choice(
        (
            "flip",
            "flip",
            "flip",
            "byte",
            "number",
            "cut",
            "insert",
            "delete",
            "double",
            "splice",
            "append",
        )
    )
    if kind in ("flip", "byte", "number") and not body:
        kind = "insert"
    at = min(place, len(body) - 1)
    if kind == "flip":
        body[at] ^= 1 << dice.randrange(8)
    elif kind == "byte":
        body[at] = dice.choice(
            (0, 1, 0x7F, 0x80, 0xFF, ord("{"), ord('"'), ord("\n"), ord("9"), dice.randrange(256))
        )
    elif (
        kind == "number"
    ):  # a large or negative little-endian number, where a length or count may stand
        body[at : at + 8] = dice.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(
            8, "little"
        )
    elif kind == "cut":
        del body[place:]
    elif kind == "insert":
        body[place:place] = dice.randbytes(length)
    elif kind == "delete":
        del body[place : place + length]
    elif kind == "double":
        body[place:place] = body[place : place + length]
    elif kind == "splice":
        other = dice.choice(others)
        start = dice.randrange(len(other) + 1)
        body[place : place + length] = other[start : start + length]
    else:
        body += dice.randbytes(dice.choice((1, 1000, 20_000)))
