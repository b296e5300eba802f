"""Signs with words of four to eight letters, in eight fonts of matplotlib's wheel, so that every machine has them.

Font and size are random and in no prompt: pictures of a word differ in them, and some are harder to read.
All signs have the same colours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import Task
from visual_grpo.starter.pretraining import write_dataset

FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    "STIXGeneralItalic",
    "cmr10",
)
LENGTHS = range(4, 9)
"""Letters of a word."""
_LIST = """
OPEN EXIT TAXI CAFE BANK PARK SHOP SALE STOP SLOW WALK BIKE BOAT FISH MEAT MILK RICE SOUP FARM GOLD HAND KEYS LAMP
LEFT MAIL NEWS PATH POOL PORT PUSH PULL REST ROAD ROOF ROOM SALT SHIP TEAM TOWN TREE TOUR WIND WOOD YARD ZONE LIFT
HOTEL METRO BREAD FRUIT JUICE MUSIC PIZZA PLANT QUIET RADIO RIVER SALAD SHOES SOUTH NORTH SPORT STAMP STORE SUGAR
TABLE TOWER TRAIN VIDEO WATER WATCH WHEAT WORLD YACHT APPLE BEACH BOOKS CHAIR CLOCK COAST DAILY DEPOT FIELD GLASS
GRAPE HONEY HORSE HOUSE LEMON MEDIA NIGHT OCEAN
BAKERY MARKET MUSEUM POLICE TICKET OFFICE GARDEN CINEMA BRIDGE CASTLE CHURCH COFFEE DOCTOR ENERGY FAMILY FLIGHT FOREST
GARAGE GUITAR HARBOR ISLAND JACKET KIOSKS LAUNCH MARBLE MIRROR MOTORS NATURE ORANGE PALACE PEPPER PLANET REPAIR RESORT
SAFETY SCHOOL SCREEN SILVER SQUARE STREET STUDIO SUMMER TAILOR TEMPLE TRAVEL TUNNEL VALLEY WINDOW WINTER YELLOW
LEATHER LIBRARY STATION FLOWERS AIRPORT ARRIVAL BALLOON BICYCLE CENTRAL CERAMIC CHICKEN CLINICS COMPANY COUNTER
CUSTOMS DENTIST EXPRESS FACTORY FASHION FERRIES FITNESS FREIGHT GALLERY GROCERY HOLIDAY KITCHEN LAUNDRY LECTURE
LOTTERY MACHINE MEDICAL MONSOON ORCHARD PARKING PASSAGE PAYMENT PLUMBER POTTERY PRINTER READING RAILWAY SANDALS
SERVICE SHUTTLE STADIUM TERRACE THEATRE TOBACCO VILLAGE WEATHER WELCOME
HOSPITAL AQUARIUM ANTIQUES BASEMENT BOUTIQUE BROCHURE BUILDING BUSINESS CAMPSITE CARNIVAL CATERING CUSTOMER DELIVERY
DISCOUNT DOWNTOWN ELECTRIC ELEVATOR ENTRANCE EXCHANGE FESTIVAL FOUNTAIN GASOLINE HARDWARE INFINITY JEWELLER KEYBOARD
LANGUAGE LUNCHEON MAGAZINE MEDICINE MOUNTAIN NATIONAL OFFICIAL ORIGINAL PAVILION PHARMACY PLATFORM REGISTRY SANDWICH
SECURITY SHIPYARD SHOPPING SKYLIGHT SOUVENIR SWIMMING TERMINAL UMBRELLA VACATION
"""
WORDS = tuple(_LIST.split())
PAPER, INK = (28, 34, 62), (235, 235, 235)
"""8-bit RGB."""
SIZES = (0.55, 1.2)
"""Smallest and largest size of a font, relative to the width that a letter has."""
_CAPITALS = 0.72
"""Height of capital letters relative to the font size, about."""
_INKED = 0.5
"""Share of ink from which a pixel belongs to a letter."""
_TARGETS = "target_images"


def prompt_of(word: str) -> str:
    return f'a sign that says "{word}"'


def random_text(rng: random.Random) -> str:
    """Returns random capital letters, as many as a word has: what a model sees that has not learned the words."""
    return "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.choice(LENGTHS)))


def draw(word: str, height: int, width: int, face: str = FACES[0], size: float = SIZES[1]) -> Image.Image:
    """Renders an RGB image of ``height`` x ``width`` pixels: from the left, each letter in the middle of an eighth of
    the width, which the widest letters of the largest size exceed."""
    pitch = width / LENGTHS[-1]
    font = ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / f"{face}.ttf", size * pitch)
    picture = Image.new("RGB", (width, height), PAPER)
    brush = ImageDraw.Draw(picture)
    foot = (height + _CAPITALS * font.size) / 2
    for place, letter in enumerate(word):
        brush.text(((place + 0.5) * pitch, foot), letter, fill=INK, font=font, anchor="ms")
    return picture


def draw_words(
    folder: Path, records_per_prompt: int, height: int, width: int, seed: int = 0, task: Task = "t2i"
) -> str:
    """Writes ``records.jsonl`` and ``target_images/`` as `write_dataset` does, ``records_per_prompt`` of each word.

    Nothing depends on ``seed``, and ``task`` is t2i.
    """

    def records(fresh: Path) -> Iterator[dict[str, Any]]:
        for word in WORDS:
            draw(word, height, width).save(fresh / _TARGETS / f"{word}.png")
        for number, word in enumerate(WORDS * records_per_prompt):
            shown = {"prompt": prompt_of(word), "target_image": f"{_TARGETS}/{word}.png", "metadata": {"text": word}}
            yield {"id": f"word_{number:05d}", **shown}

    recipe = {"records_per_prompt": records_per_prompt, "height": height, "width": width}
    return write_dataset(folder, recipe, (_TARGETS,), records)


class LettersApart:
    """Share of the gaps between neighbouring letters that are free of ink: 1 for a sign whose letters all stand apart.

    Letters that become larger or bolder are easier to read, until their strokes touch.
    """

    guard = "more of its letters touch"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Tensor:
        words = [len(record.metadata["text"]) for record in prompts]
        return torch.stack([_free_gaps(sample, letters) for sample, letters in zip(samples, words, strict=True)])


def _free_gaps(sign: Tensor, letters: int) -> Tensor:
    paper, ink = torch.tensor([PAPER, INK], dtype=torch.float32)
    coverage = ((sign.float() - paper[:, None, None]) / (ink - paper)[:, None, None]).mean(0)
    edges = [round(place * sign.shape[2] / LENGTHS[-1]) for place in range(1, letters)]
    # The two columns next to the middle of a gap: ink in both joins the letters.
    return torch.stack([coverage[:, edge - 1 : edge + 1].amin(1).amax() < _INKED for edge in edges]).float().mean()
