"""Fingerprints as words that can be read out on the telephone.

Each word stands for one byte, so `NUM_WORDS` words carry 8 x `NUM_WORDS` = 96 bits of a fingerprint
of 256. To make another roster with the words of a given one takes about 2^96 trials; to make two
rosters of one's own with equal words about 2^48. Words are for people: what programs compare,
and what consent is recorded for, is the whole fingerprint.

No two words begin with the same three letters or are closer than three changes of a letter.
"""

from __future__ import annotations

from typing import Final

NUM_WORDS: Final = 12
_GROUP: Final = 4

_LIST: Final = """
    acid acorn agent album alley amber angel ankle apron armor aspen atlas attic autumn avocado
    badge baker bamboo banjo barn beach bell berry bison blanket blossom bonfire book bottle bread
    bucket buffalo butter cabin cactus camel canoe captain cargo castle cedar chalk chess chimney
    cinema circle clay cliff clock cobra coffee copper cotton cradle cricket crown crystal cymbal
    daisy dancer denim desert diamond doctor dolphin donkey dragon drum dune dynamo eagle earth echo
    eclipse elbow elder emerald engine fabric falcon feather fence fiddle finger flame forest fossil
    fruit funnel garden gate giraffe glacier glove goblet gorilla granite guitar helmet herb hippo
    horizon husky hyena iceberg igloo indigo insect island ivory jaguar jasmine jewel jigsaw jungle
    kayak kimono kitchen kiwi knight koala ladder lagoon lantern lava lemon leopard library lilac
    linen lizard lobster lotus magnet mammoth marble meadow mermaid metal mirror mitten mosaic
    muffin museum napkin needle nest nickel ninja nugget nutmeg nylon oasis oatmeal obelisk ocean
    octopus omelet onion opal orange orchid oxygen ozone palace panther parrot pasta pebble pelican
    pencil piano pickle pigeon pilot pirate poem polar poppy potato prairie prism pumpkin puppet
    purple pyramid quarry queen quilt rabbit radio rainbow ranch raven razor ribbon rubber rugby
    safari sandal scarf school scooter sheriff shovel silver sketch smoke snail soap spider stable
    sugar summer sunset syrup tailor teapot temple tennis theater thimble thunder toast torch tower
    tractor trumpet tulip tundra tuxedo twig typhoon unicorn urban vacuum vanilla vessel viking
    village violin visitor volcano voyage vulture waffle walnut wheel whistle willow wolf yacht
    yogurt zephyr zigzag zinc
"""
WORDS: Final = tuple(_LIST.split())


def as_words(fingerprint: str) -> str:
    """Return the first 96 bits of a hexadecimal fingerprint as three groups of four words.

    >>> as_words("00ff" * 16)
    'acid zinc acid zinc, acid zinc acid zinc, acid zinc acid zinc'
    """
    words = [WORDS[byte] for byte in bytes.fromhex(fingerprint)[:NUM_WORDS]]
    groups = [words[start : start + _GROUP] for start in range(0, NUM_WORDS, _GROUP)]
    return ", ".join(" ".join(group) for group in groups)
