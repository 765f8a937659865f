"""The vocabulary of places on the residual stream: "embed", "5.resid_pre", "5.attn", "final"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from resstream.errors import SiteError

BOUNDARIES = ("resid_pre", "resid_mid", "resid_post")
WRITES = ("attn", "mlp")
KINDS = (*BOUNDARIES, *WRITES)
ENDS = ("embed", "final")

_PATTERN = re.compile(r"(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Site:
    """One place on the stream: a boundary of a block, or what one of its branches writes.

    >>> site = Site(5, "resid_pre")
    >>> str(site), site.is_write
    ('5.resid_pre', False)
    """

    layer: int
    kind: str

    @property
    def is_write(self) -> bool:
        """Whether this is a branch's additive write rather than a state of the stream."""
        return self.kind in WRITES

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}"


def parse_site(text: str | Site, *, n_layers: int, parallel: bool = False, model: str = "this model") -> Site:
    """Read a site name, and check that a model of `n_layers` layers has it.

    "embed" is the stream before the first block and "final" the stream after the last, so both are names of boundaries.

    >>> parse_site("5.attn", n_layers=12)
    Site(layer=5, kind='attn')
    >>> str(parse_site("final", n_layers=12))
    '11.resid_post'

    Args:
        text: a site name, or a Site, which is checked the same way.
        n_layers: number of blocks of the model.
        parallel: whether attention and MLP read the same input, in which case there is no resid_mid.
        model: name to use in the message.
    Raises:
        SiteError: no such site; the message names the nearest one.
    """
    name = str(text)
    if name == "embed":
        return Site(0, "resid_pre")
    if name == "final":
        return Site(n_layers - 1, "resid_post")
    match = _PATTERN.fullmatch(name)
    if match is None or match[2] not in KINDS:
        raise SiteError(_no_site(name, n_layers, model, match))
    site = Site(int(match[1]), match[2])
    if site.layer >= n_layers:
        nearest = Site(n_layers - 1, site.kind)
        raise SiteError(f'no site "{name}": {model} has layers 0-{n_layers - 1}; did you mean "{nearest}"?')
    if parallel and site.kind == "resid_mid":
        raise SiteError(
            f'no site "{name}": in {model} attention and MLP read the same input, so the stream has no middle; '
            f'use "{site.layer}.resid_pre" or "{site.layer}.resid_post"'
        )
    return site


def layers_from(asked: str | int | Sequence[int], *, n_layers: int, model: str) -> list[int]:
    """Read a choice of layers: "each", one number, or several; negative numbers count from the last layer.

    >>> layers_from("each", n_layers=3, model="toy")
    [0, 1, 2]
    >>> layers_from([0, -1], n_layers=3, model="toy")
    [0, 2]
    """
    if isinstance(asked, str):
        if asked != "each":
            raise SiteError(f'layers="{asked}" is not a choice of layers; write layers="each" or a list such as [0, 5]')
        return list(range(n_layers))
    numbers = [asked] if isinstance(asked, int) else list(asked)
    for number in numbers:
        if not -n_layers <= number < n_layers:
            raise SiteError(f"no layer {number}: {model} has layers 0-{n_layers - 1}; did you mean {n_layers - 1}?")
    return [number % n_layers for number in numbers]


def _no_site(name: str, n_layers: int, model: str, match: re.Match[str] | None) -> str:
    asked = match[2] if match else name.rpartition(".")[2]
    close = get_close_matches(asked, [*KINDS, *ENDS], n=1, cutoff=0.4)
    number = re.search(r"\d+", name)
    layer = min(int(number[0]), n_layers - 1) if number else 0
    guess = close[0] if close else "resid_post"
    hint = guess if guess in ENDS else f"{layer}.{guess}"
    return (
        f'no site "{name}": {model} has "embed", "final" and, for each layer L of 0-{n_layers - 1}, '
        f'{", ".join(f"L.{kind}" for kind in KINDS)}; did you mean "{hint}"?'
    )
