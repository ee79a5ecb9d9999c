"""The words of a fingerprint can be told apart by ear, and carry 96 bits."""

from __future__ import annotations

from itertools import combinations

from dpcsgp.federation.words import NUM_WORDS, WORDS, as_words


def changes(first: str, second: str) -> int:
    """Return the number of letters to insert, delete or replace."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            least = min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
            diagonal, row[j] = row[j], least
    return row[-1]


def test_every_byte_has_a_short_word_of_its_own() -> None:
    assert len(set(WORDS)) == 256
    assert all(word.isascii() and word.islower() and 4 <= len(word) <= 7 for word in WORDS)


def test_no_two_words_begin_alike_or_are_close() -> None:
    assert len({word[:3] for word in WORDS}) == 256
    assert not [pair for pair in combinations(WORDS, 2) if changes(*pair) < 3]


def test_words_say_the_first_bytes_and_no_more() -> None:
    first = bytes(range(32)).hex()
    assert as_words(first).replace(",", "").split() == list(WORDS[:NUM_WORDS])
    for place in range(32):
        changed = bytearray(bytes.fromhex(first))
        changed[place] ^= 1
        assert (as_words(changed.hex()) != as_words(first)) == (place < NUM_WORDS)
