"""The two ends of a path, senders and receivers: from what a user writes to sites that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeAlias

from resstream.errors import SiteError, listed
from resstream.models.trunk import ResidualModel
from resstream.sites import INSIDE, Site
from resstream.stream.direct import stage_of

End: TypeAlias = tuple[Site, ...]

_SENDERS = ("attn", "mlp", "head")
_RECEIVERS = ("attn", "mlp", "head", "q", "k", "v")


def senders_from(model: ResidualModel, asked: str | Sequence[Any]) -> tuple[End, ...]:
    """Read what a user names as senders: each a write, or several that are moved together.

    >>> import resstream as rs
    >>> senders = senders_from(rs.load("smollm2"), ["embed", "5.head.3", ["6.mlp", "7.mlp"]])
    >>> [name_of(sender) for sender in senders]
    ['embed', '5.head.3', '6.mlp+7.mlp']

    Raises:
        SiteError: a place that is not a write, or writes that hold each other.
    """
    embed = Site(0, "resid_pre")
    hint = 'name what writes to the stream, such as "embed", "5.attn", "5.mlp" or "5.head.0"'
    return _ends(model, asked, _SENDERS, embed, "sender", hint)


def receivers_from(model: ResidualModel, asked: str | Sequence[Any]) -> tuple[End, ...]:
    """Read what a user names as receivers: each a place that reads the stream, or several that are patched together.

    >>> import resstream as rs
    >>> receivers = receivers_from(rs.load("smollm2"), ["5.q.3", "5.mlp", ["6.k.0", "6.v.0"], "logits"])
    >>> [name_of(receiver) for receiver in receivers]
    ['5.q.3', '5.mlp', '6.k.0+6.v.0', 'logits']

    Raises:
        SiteError: a place that does not read the stream, or places that hold each other.
    """
    final = Site(model.n_layers - 1, "resid_post")
    hint = 'name what reads the stream, such as "5.q.0", "5.k.0", "5.v.0", "5.head.0", "5.attn", "5.mlp" or "logits"'
    ends = _ends(model, asked, _RECEIVERS, final, "receiver", hint)
    for end in ends:
        if final in end and len(end) > 1:
            raise SiteError(
                f'"logits" cannot be patched together with {listed(str(site) for site in end if site != final)}: the '
                "readout comes last, and what it is given would take the place of all that they do; give it on its own"
            )
    return ends


def name_of(end: End) -> str:
    """What to call one end on an axis."""
    return "+".join("embed" if str(s) == "0.resid_pre" else "logits" if s.kind == "resid_post" else str(s) for s in end)


def require_a_path(model: ResidualModel, senders: Sequence[End], receivers: Sequence[End]) -> None:
    """Refuse ends of which no sender lies below any receiver.

    Raises:
        SiteError: with the lowest sender and the highest receiver.
    """
    low = min((site for end in senders for site in end), key=lambda site: stage_of(model, site))
    high = max((site for end in receivers for site in end), key=lambda site: stage_of(model, site))
    if stage_of(model, low) >= stage_of(model, high):
        raise SiteError(
            f'no path leads from any sender to any receiver: the lowest sender is "{name_of((low,))}", and the highest '
            f'receiver, "{name_of((high,))}", does not read what it writes; name senders further down, or "logits"'
        )


def _ends(
    model: ResidualModel, asked: str | Sequence[Any], kinds: Sequence[str], outermost: Site, role: str, hint: str
) -> tuple[End, ...]:
    found: list[End] = []
    for each in [asked] if isinstance(asked, str) else asked:
        if isinstance(each, str):
            found += [(site,) for site in _sites(model, each, kinds, outermost, role, hint)]
        else:
            together = dict.fromkeys(
                site for name in each for site in _sites(model, name, kinds, outermost, role, hint)
            )
            found.append(_apart(tuple(sorted(together, key=lambda site: stage_of(model, site))), role))
    if not found or () in found:
        raise SiteError(f"a {role} is missing; {hint}")
    return tuple(dict.fromkeys(found))


def _sites(model: ResidualModel, name: str, kinds: Sequence[str], outermost: Site, role: str, hint: str) -> list[Site]:
    """The sites that a name means: one, or, where it is a kind, each of every layer."""
    if name in kinds:
        parts = range(_count(model, name)) if name in INSIDE else (None,)
        return [Site(layer, name, part) for layer in model.layers for part in parts]
    site = outermost if name == name_of((outermost,)) else model.site(name)
    if site.kind not in kinds and site != outermost:
        raise SiteError(f'"{name}" is not a {role}; {hint}, or {listed(kinds)} for each of every layer')
    if site.is_inside:
        _count(model, site.kind)
    return [site]


def _count(model: ResidualModel, kind: str) -> int:
    model.require_inside(kind)
    return model.parts[kind]


def _apart(end: End, role: str) -> End:
    """An end whose sites do not hold each other, or write over each other."""
    for one, other in combinations(end, 2):
        same_branch = one.layer == other.layer and one.is_write | one.is_inside and other.is_write | other.is_inside
        if not same_branch or one.branch != other.branch:
            continue
        heads = "head" in (one.kind, other.kind) and one.kind != other.kind
        same_kind = one.kind == other.kind and None in (one.part, other.part)
        if one.is_write or other.is_write or heads or same_kind:
            raise SiteError(
                f'"{one}" and "{other}" cannot be one {role}: what is put at one of them takes the place of the other; '
                "give each on its own"
            )
    return end
