"""The vocabulary and geometry of the drawn words: three letters, each on its own tile.

Words are pronounceable (consonant, vowel, consonant) and consist of letters that look different: 256 in total. The
tiles' colours are equally bright, so that image tokens identify the tile whatever letter is on it, and the letter is
determined by the quoted text alone. Colours are 8-bit RGB.
"""

from __future__ import annotations

from itertools import product

CONSONANTS = "HKLNPSTZ"
VOWELS = "AEOU"
WORDS = tuple("".join(letters) for letters in product(CONSONANTS, VOWELS, CONSONANTS))
"""All words in a fixed order."""
VERSION = 2
"""Version of the pretraining, to be raised when the same configuration gives other weights."""
LETTERS = 3
TILES = ((36, 36, 78), (36, 78, 36), (78, 36, 36))
"""From left to right."""
INK = (235, 235, 235)


def prompt_of(word: str) -> str:
    return f'a sign that says "{word}"'
