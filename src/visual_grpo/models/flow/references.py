"""Source images of edits as tokens next to the noise's: their latents, positions and sizes.

Several editing models read the sources so: the transformer gets the tokens of the image that is denoised and then those
of each source, and what it gives for the sources is dropped. Shapes: N records, b rows, K sources of a record, S tokens
of all K, each token of the width D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL.Image import Image
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.flow.flow_model import Velocity
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import source_count

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class References:
    """The encoded sources of a record, or of b rows whose sources have the same sizes."""

    tokens: Tensor
    """[b, S, D] float32."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of tokens of each of the K sources."""

    @classmethod
    def of(cls, images: Sequence[Tensor]) -> References:
        """``images``: at least one [1, D, rows, columns], a vector for each token."""
        tokens = torch.cat([image.flatten(2).transpose(1, 2) for image in images], 1)
        return cls(tokens=tokens, grids=tuple((image.shape[2], image.shape[3]) for image in images))

    def beside(self, tokens: Tensor) -> Tensor:
        """Appends the sources to ``tokens`` [b, T, D]."""
        return torch.cat([tokens, self.tokens.to(tokens.device)], 1) if self.grids else tokens

    def positions(self, times: Sequence[int]) -> Tensor:
        """[S, 3] int64: of each token the time of its source, one of the K ``times``, its row and its column."""
        places = [
            torch.cartesian_prod(torch.tensor([time]), torch.arange(rows), torch.arange(columns))
            for time, (rows, columns) in zip(times, self.grids, strict=True)
        ]
        return torch.cat([torch.zeros(0, 3, dtype=torch.int64), *places])


_NONE = References(tokens=torch.zeros(1, 0, 0), grids=())


def read_sources(
    records: Sequence[PromptRecord], allowed: range, encode: Callable[[Image], Tensor]
) -> list[References]:
    """Encodes the sources of N records as `encode_sources`; ``encode`` gives [1, D, rows, columns]."""
    return [References.of(images) if images else _NONE for images in encode_sources(records, allowed, encode)]


def encode_sources(records: Sequence[PromptRecord], allowed: range, encode: Callable[[Image], T]) -> list[list[T]]:
    """Applies ``encode`` to the sources of N records, to each image once.

    Raises UserError for records whose numbers of sources differ, or are not ``allowed``, and for an image for which
    ``encode`` raises ValueError.
    """
    require_sources(records, allowed)
    made: dict[Path, T] = {}
    for path in (path for record in records for path in record.source_images):
        if path not in made:
            try:
                made[path] = encode(read_image(path))
            except ValueError as error:
                raise UserError(f"the model cannot read the source image {path}: {error}") from error
    return [[made[path] for path in record.source_images] for record in records]


def require_sources(records: Sequence[PromptRecord], allowed: range) -> int:
    """Returns the number of sources of every record. Raises UserError where it differs, or is not ``allowed``."""
    count = source_count(records)
    if count not in allowed:
        raise UserError(f"this model takes {taken(allowed)}, and the record {records[0].id!r} has {count}.")
    return count


def taken(allowed: range) -> str:
    """Says in words how many sources a record may have."""
    least, most = allowed[0], allowed[-1]
    number = most or "no"
    return f"{number if least == most else f'{least} to {most}'} source image{'s' * (most > 1)}"


def by_size(
    references: Sequence[References], entries: Tensor, field: Callable[[Tensor, References], Velocity]
) -> Velocity:
    """Returns the velocity field of the rows of ``entries`` ([b] int64).

    ``field(entries, references)`` returns that of rows whose sources have the same sizes, which run together.
    """
    rows_of: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for row, entry in enumerate(entries.tolist()):
        rows_of.setdefault(references[entry].grids, []).append(row)
    members = [torch.tensor(rows) for rows in rows_of.values()]
    fields = []
    for grids, rows in zip(rows_of, members, strict=True):
        tokens = torch.cat([references[entry].tokens for entry in entries[rows].tolist()])
        fields.append(field(entries[rows], References(tokens=tokens, grids=grids)))
    if len(fields) == 1:
        return fields[0]
    device = references[0].tokens.device
    back, places = torch.cat(members).argsort().to(device), [rows.to(device) for rows in members]

    def velocity(state: Tensor, timestep: float) -> Tensor:
        return torch.cat([part(state[rows], timestep) for part, rows in zip(fields, places, strict=True)])[back]

    return velocity


def encoded(vae: Any, pixels: Tensor) -> Tensor:
    """The most likely latents of an image, [1, 3, H, W] (or with frames) from -1 to 1, in float32."""
    with on_device(vae):
        latents: Tensor = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
    return latents.float()
