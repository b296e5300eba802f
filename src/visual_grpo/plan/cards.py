"""What GPUs can do, as their makers publish it: dense operations without sparsity.

Memory is what torch says that a card has in all ("total capacity" of its errors of too little memory, as users posted
them; the least of several drivers): 1 to 4 % less than nvidia-smi shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from visual_grpo.errors import UserError, nearest_hint

_GIB = 2**30
_PCIE = 32e9
"""Of version 4.0 with 16 lanes."""
_SPARE = 0.05
"""Share of the memory that a plan leaves to the CUDA context, the libraries' workspaces and fragmentation."""


@dataclass(frozen=True, kw_only=True)
class Card:
    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second between memory and processors."""
    half: float
    """FLOP/s of dense matrix products in bfloat16 or float16, summed in float32."""
    single: float
    """FLOP/s in float32."""
    link: float
    """Bytes a second from the other cards of a machine, in one direction: by NVLink, else by PCIe."""

    @property
    def usable(self) -> int:
        """Bytes that tensors may take."""
        return round(self.memory * (1 - _SPARE))

    def flops(self, dtype: str) -> float:
        """FLOP/s of a model of that dtype."""
        return self.single if dtype == "float32" else self.half


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card(name="L4", memory=22.03 * _GIB, bandwidth=0.3e12, half=121e12, single=30.3e12, link=_PCIE),
        Card(name="A10", memory=22.06 * _GIB, bandwidth=0.6e12, half=125e12, single=31.2e12, link=_PCIE),
        Card(name="A10G", memory=22.06 * _GIB, bandwidth=0.6e12, half=70e12, single=35e12, link=_PCIE),
        Card(name="RTX 4090", memory=23.52 * _GIB, bandwidth=1.008e12, half=165.2e12, single=82.6e12, link=_PCIE),
        Card(name="L40S", memory=44.39 * _GIB, bandwidth=0.864e12, half=362e12, single=91.6e12, link=_PCIE),
        Card(name="RTX A6000", memory=47.40 * _GIB, bandwidth=0.768e12, half=154.8e12, single=38.7e12, link=_PCIE),
        Card(name="A100 80GB", memory=79.14 * _GIB, bandwidth=2.039e12, half=312e12, single=19.5e12, link=300e9),
        Card(name="H100", memory=79.10 * _GIB, bandwidth=3.35e12, half=989e12, single=67e12, link=450e9),
        Card(name="H200", memory=139.72 * _GIB, bandwidth=4.8e12, half=989e12, single=67e12, link=450e9),
    )
}


def find_card(name: str) -> Card:
    """Upper case, blanks, hyphens and RTX do not matter. Raises UserError with the known names."""
    wanted = _plain(name)
    for card in CARDS.values():
        if wanted in (_plain(card.name), _plain(card.name).removeprefix("rtx")):
            return card
    begun = next((card.name for card in CARDS.values() if _plain(card.name).startswith(wanted)), None)
    hint = nearest_hint(name, CARDS) if begun is None else f" Did you mean {begun!r}?"
    raise UserError(f"plan.gpu is {name!r}, which is no known card.{hint} Known: {known_cards()}")


def known_cards() -> str:
    return ", ".join(f"{name} ({card.memory / _GIB:.0f} GiB)" for name, card in CARDS.items())


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
