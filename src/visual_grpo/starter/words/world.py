"""The vocabulary and geometry of the drawn words: three letters, each on a tile of its own.

Words are consonant, vowel, consonant, so that they can be spoken, of letters that look little alike: 256 in all.
The tiles' colours are equally bright: an image token tells the tiles apart whatever letter stands on them, and
which letter it is comes through the quoted text alone. Colours are 8-bit RGB.
"""

from __future__ import annotations

from itertools import product

CONSONANTS = "HKLNPSTZ"
VOWELS = "AEOU"
WORDS = tuple("".join(letters) for letters in product(CONSONANTS, VOWELS, CONSONANTS))
"""All of them, in a fixed order."""
VERSION = 2
"""Of the pretraining: raised when the same configuration gives other weights."""
LETTERS = 3
TILES = ((36, 36, 78), (36, 78, 36), (78, 36, 36))
"""From left to right."""
INK = (235, 235, 235)


def prompt_of(word: str) -> str:
    return f'a sign that says "{word}"'
