"""Transplants: one run with some of its values taken from another run, as a row for the executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.rows import Base, Put, Row, entry_after


def transplant(
    model: ResidualModel, base: Base, sites: Sequence[Site], target: int, donor: int, here: Bool[Tensor, " pos"]
) -> Row:
    """The target's run with the donor's values at some sites and positions.

    Args:
        model: the model that runs.
        base: both runs, with the values at the sites.
        sites: where values are taken from, all of one kind.
        target, donor: prompts of the base run.
        here: at which positions.
    """
    if len(sites) > 1:
        # A value that both runs share is put there too: the row's own may have been changed by a site below.
        return Row(target, _below(sites[0]), change=_puts(model, base, sites, donor, here))
    (site,) = sites
    own, other = (_value(base, site, prompt) for prompt in (target, donor))
    # Positions at which nothing changes keep the base run's own bits.
    changed = here & _differ(site, own, other)
    if site.is_inside:
        enter = _below(site)
        return Row(target, enter, change={moved(site): Put(other, changed)} if changed.any() else {})
    keep = changed[:, None]
    if site.is_write and model.carried:
        return Row(target, _below(site), change={site: Put(other, changed)} if changed.any() else {})
    if not site.is_write:
        enter = entry_after(model, site.layer) if site.kind == "resid_post" else site
        return Row(target, enter, lambda: torch.where(keep, other, own), twins=(donor,))
    enter = after_write(model, site)
    after = base.values[enter][target]

    def stream() -> Tensor:
        # In float64, since half precision would round the difference of two writes and then the sum.
        moved = after.double() + (other.double() - own.double())
        return torch.where(keep, moved.to(after), after)

    return Row(target, enter, stream, twins=(donor,))


def after_write(model: ResidualModel, site: Site) -> Site:
    """The state of the stream that a branch's write has been added to."""
    sequential_attn = site.kind == "attn" and model.layout == "sequential"
    return Site(site.layer, "resid_mid") if sequential_attn else entry_after(model, site.layer)


def kept_for(model: ResidualModel, sites: Sequence[Site]) -> list[Site]:
    """The values that a base run must keep, so that transplants at these sites can be made from it."""
    whole = dict.fromkeys(moved(site.whole) for site in sites)
    return [*whole, *(after_write(model, site) for site in whole if site.is_write)]


def moved(site: Site) -> Site:
    """Where a value is really put: a head's write is moved as its z, so that whatever follows is the model's own."""
    return Site(site.layer, "z", site.part) if site.kind == "head" else site


def _puts(model: ResidualModel, base: Base, sites: Sequence[Site], donor: int, here: Tensor) -> dict[Site, Put | None]:
    puts: dict[Site, Put | None] = {}
    for site in sites:
        place = entry_after(model, site.layer) if site.kind == "resid_post" else moved(site)
        puts[place] = Put(_value(base, site, donor), here)
    return puts


def _value(base: Base, site: Site, prompt: int) -> Tensor:
    """A site's value in one run: positions first, or, for a pattern, queries last but one."""
    site = moved(site)
    value = base.values[site.whole][prompt]
    if site.part is None:
        return value
    return value[site.part] if site.kind == "pattern" else value[:, site.part]


def _differ(site: Site, own: Tensor, other: Tensor) -> Tensor:
    """The positions at which two values differ; a pattern's are its queries."""
    apart = own != other
    if site.kind == "pattern":
        return apart.any(-1).reshape(-1, apart.shape[-2]).any(0)
    return apart.reshape(len(apart), -1).any(-1)


def _below(site: Site) -> Site:
    return Site(site.layer, "resid_pre")
