"""The vocabulary of places: "embed", "5.resid_pre", "5.attn", "final" on the stream, "5.head.3" inside a branch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from resstream.errors import SiteError

BOUNDARIES = ("resid_pre", "resid_mid", "resid_post")
WRITES = ("attn", "mlp")
KINDS = (*BOUNDARIES, *WRITES)
INSIDE = ("head", "z", "q", "k", "v", "pattern", "neuron")
ENDS = ("embed", "final")

_PATTERN = re.compile(r"(\d+)\.(\w+?)(?:\.(\d+))?")
_PARTS = {"k": "key/value heads", "v": "key/value heads", "neuron": "neurons"}


@dataclass(frozen=True, slots=True)
class Site:
    """One place: a boundary of a block, what one of its branches writes, or a value inside a branch.

    >>> site = Site(5, "resid_pre")
    >>> str(site), site.is_write
    ('5.resid_pre', False)
    >>> head = Site(5, "head", 3)
    >>> str(head), head.is_inside, head.branch, str(head.whole)
    ('5.head.3', True, 'attn', '5.head')

    Attributes:
        layer: the block, counted from 0.
        kind: one of KINDS on the stream; inside a branch, one of INSIDE: "head" is a head's additive write, "z" what
            the output projection reads, "q", "k" and "v" what the projections return, before norms and rotation,
            "pattern" the attention weights, "neuron" what the MLP's down-projection reads.
        part: which head, key/value head or neuron; None means all of them.
    """

    layer: int
    kind: str
    part: int | None = None

    @property
    def is_write(self) -> bool:
        """Whether this is a branch's additive write rather than a state of the stream."""
        return self.kind in WRITES

    @property
    def is_inside(self) -> bool:
        """Whether this is a value inside a branch rather than one on the stream."""
        return self.kind in INSIDE

    @property
    def branch(self) -> str:
        """The branch that this is the write of, or lies in: "attn" or "mlp".

        Raises:
            SiteError: a boundary, which lies between branches.
        """
        if self.kind in BOUNDARIES:
            raise SiteError(
                f'"{self}" is a state of the stream, in no branch; name a write such as "{self.layer}.attn"'
            )
        return "mlp" if self.kind in ("mlp", "neuron") else "attn"

    @property
    def whole(self) -> Site:
        """The same place with all its parts."""
        return Site(self.layer, self.kind)

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}" if self.part is None else f"{self.layer}.{self.kind}.{self.part}"


def parse_site(text: str | Site, *, n_layers: int, parallel: bool = False, model: str = "this model") -> Site:
    """Read a site name, and check that a model of `n_layers` layers has it.

    "embed" is the stream before the first block and "final" the stream after the last, so both are names of boundaries.

    >>> parse_site("5.attn", n_layers=12)
    Site(layer=5, kind='attn', part=None)
    >>> str(parse_site("final", n_layers=12))
    '11.resid_post'
    >>> parse_site("5.head.3", n_layers=12).part
    3

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
    if match is None or match[2] not in (*KINDS, *INSIDE):
        raise SiteError(_no_site(name, n_layers, model, match))
    site = Site(int(match[1]), match[2], None if match[3] is None else int(match[3]))
    if site.part is not None and not site.is_inside:
        guess = {"attn": f', such as "{site.layer}.head.{site.part}"', "mlp": f', such as "{site.layer}.neuron.0"'}
        raise SiteError(
            f'no site "{name}": "{site.kind}" has no numbered parts, only {", ".join(INSIDE)} have'
            f'{guess.get(site.kind, "")}; did you mean "{site.whole}"?'
        )
    if site.layer >= n_layers:
        nearest = Site(n_layers - 1, site.kind, site.part)
        raise SiteError(f'no site "{name}": {model} has layers 0-{n_layers - 1}; did you mean "{nearest}"?')
    if parallel and site.kind == "resid_mid":
        raise SiteError(
            f'no site "{name}": in {model} attention and MLP read the same input, so the stream has no middle; '
            f'use "{site.layer}.resid_pre" or "{site.layer}.resid_post"'
        )
    return site


def check_part(site: Site, n_parts: int, *, model: str = "this model") -> Site:
    """Check that a place inside a branch has the part that a site names.

    >>> str(check_part(Site(5, "k", 2), 3))
    '5.k.2'

    Args:
        site: a place inside a branch.
        n_parts: how many parts the model has there.
        model: name to use in the message.
    Raises:
        SiteError: no such part; the message names the nearest one.
    """
    if site.part is not None and site.part >= n_parts:
        noun = _PARTS.get(site.kind, "query heads")
        raise SiteError(
            f'no site "{site}": {model} has {noun} 0-{n_parts - 1} in each layer; '
            f'did you mean "{Site(site.layer, site.kind, n_parts - 1)}"?'
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
    close = get_close_matches(asked, INSIDE, n=1, cutoff=0.75) or get_close_matches(asked, (*KINDS, *ENDS), 1, 0.4)
    number = re.search(r"\d+", name)
    layer = min(int(number[0]), n_layers - 1) if number else 0
    guess = close[0] if close else "resid_post"
    hint = guess if guess in ENDS else f"{layer}.{guess}"
    return (
        f'no site "{name}": {model} has "embed", "final" and, for each layer L of 0-{n_layers - 1}, '
        f"{', '.join(f'L.{kind}' for kind in KINDS)}, and inside its branches "
        f'{", ".join(f"L.{kind}" for kind in INSIDE)}, whole or one part, such as L.head.3; did you mean "{hint}"?'
    )
