"""Read the stream: what each layer found, what each branch wrote and held inside, and the logits they led to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import SiteError, listed
from resstream.models.tokens import Positions, Prompts, Tokens
from resstream.models.trunk import TOLERANCE, ResidualModel, Trunk, relative_distance
from resstream.sites import ENDS, INSIDE, KINDS, Site
from resstream.stream.parts import at_positions, part_of, position_axis


@dataclass(frozen=True)
class Stream:
    """What was read off one forward pass; every tensor is a copy of its own.

    >>> import resstream as rs
    >>> stream = rs.read(rs.load("smollm2"), ["Hello", "Hello there, world"], sites=["embed", "final"])
    >>> stream.sites, stream.tokens.lengths, stream["final"].shape
    (('0.resid_pre', '29.resid_post'), (1, 4), torch.Size([2, 4, 576]))

    Attributes:
        tokens: the batch that was read, as token ids and strings.
        values: one tensor per site, "prompt kept d_model" on the stream and as in `read` inside a branch; only the
            chosen positions are kept if some were chosen.
        logits: the model's logits at every position, "prompt pos vocab".
        check: how far the sum of what was read is from the model's own stream.
    """

    tokens: Tokens
    values: dict[Site, Float[Tensor, "prompt ..."]]
    logits: Float[Tensor, "prompt pos vocab"]
    check: Check
    model: ResidualModel

    def __getitem__(self, name: str | Site) -> Float[Tensor, "prompt ..."]:
        """The tensor of one site, such as stream["5.resid_post"] or stream["5.head.3"].

        Raises:
            SiteError: a site that the model does not have, or that was not read.
        """
        site = self.model.site(name)
        if site not in self.values:
            raise SiteError(
                f'site "{name}" was not read: this stream holds {listed(map(str, self.values))}; '
                f'ask for it with rs.read(model, prompts, sites=["{name}"])'
            )
        return self.values[site]

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that were read."""
        return tuple(map(str, self.values))

    def __repr__(self) -> str:
        return (
            f"Stream({len(self.tokens)} prompts of {self.tokens.width} tokens, {len(self.values)} sites; {self.check})"
        )


def read(
    model: ResidualModel, prompts: Prompts, *, sites: str | Sequence[str] = ("resid_post",), positions: Positions = None
) -> Stream:
    """Run prompts through a model and read the residual stream at the sites that you name.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> stream = rs.read(model, "The Eiffel Tower is in the city of", sites=["resid_post", "3.attn"])
    >>> stream["29.resid_post"].shape, stream["3.attn"].shape
    (torch.Size([1, 9, 576]), torch.Size([1, 9, 576]))
    >>> model.tokenizer.decode(stream.logits[0, -1].argmax())
    ' Paris'
    >>> stream = rs.read(model, "The Eiffel Tower is in the city of", sites=["5.head.3", "5.z", "5.k.2", "5.pattern"])
    >>> for site in stream.sites:
    ...     print(site, list(stream[site].shape))
    5.head.3 [1, 9, 576]
    5.z [1, 9, 9, 64]
    5.k.2 [1, 9, 64]
    5.pattern [1, 9, 9, 9]

    Args:
        model: a model from `load`, or one that is being edited.
        prompts: a text, several texts, or token ids.
        sites: places such as "5.resid_pre", "5.attn", "embed" or "final"; a name without a layer, such as
            "resid_post", means that place in every layer. Inside a branch, with a number for one part and without for
            all: "5.head.3" [prompt, pos, d_model], "5.z", "5.q", "5.k", "5.v" [prompt, pos, head, d_head],
            "5.pattern" [prompt, head, query, key], "5.neuron" [prompt, pos, neuron]; one part lacks its own axis.
        positions: which positions to keep, counted within each prompt; all of them by default. Choosing the same
            number in each prompt gives tensors of that many positions.
    Returns:
        A Stream. Values beyond a shorter prompt's end are zero; the positions of a pattern are its queries.
    Raises:
        SiteError: a place that the model does not have.
        UnsupportedModelError: a place inside a branch that cannot be told apart, or not be proved, in this model.
        PromptError: an empty or too long prompt, or a position that a prompt does not have.
    """
    tokens = model.tokenize(prompts)
    wanted = every_site(model, sites)
    proofs = [model.require_inside(kind) for kind in {site.kind for site in wanted if site.is_inside}]
    chosen = tokens.at(positions)
    with torch.no_grad():
        values, final = trace(model, model.trunk(tokens), wanted)
        logits = model.readout(final)
        check = _worst([*_checks(model, tokens, values, logits), *proofs])
    kept = {site: _keep(values[site], site, chosen, tokens, positions) for site in wanted}
    return Stream(tokens, kept, logits, check, model)


def trace(model: ResidualModel, trunk: Trunk, sites: Iterable[Site]) -> tuple[dict[Site, Tensor], Tensor]:
    """Run a trunk once; keep the stream at some sites, and what the readout reads.

    Whole layers are run even where their parts are asked for too, so boundaries are bit-equal to the model's own.
    Values inside a branch are seen as the layer runs.
    """
    wanted = set(sites)
    values: dict[Site, Tensor] = {}
    x = trunk.x0
    for layer in trunk.order:
        x = trunk.at(Site(layer, "resid_pre"), x)
        inside = [site for site in wanted if site.layer == layer and site.is_inside]
        post, found = _inside(trunk, layer, x, inside) if inside else (trunk.layer(layer, x), {})
        found |= {Site(layer, "resid_pre"): x, Site(layer, "resid_post"): post}
        if wanted & {Site(layer, kind) for kind in ("attn", "mlp", "resid_mid")}:
            found[Site(layer, "attn")] = attn = trunk.write(Site(layer, "attn"), x)
            if model.layout == "sequential":
                mid = model.carry((Site(layer, "attn"),)).add(x, attn)
                found[Site(layer, "resid_mid")] = x = trunk.at(Site(layer, "resid_mid"), mid)
            if Site(layer, "mlp") in wanted:
                found[Site(layer, "mlp")] = trunk.write(Site(layer, "mlp"), x)
        x = found[Site(layer, "resid_post")]
        values.update({site: value for site, value in found.items() if site in wanted})
    return values, x


def expand_sites(model: ResidualModel, sites: str | Sequence[str]) -> list[Site]:
    """Names of places on the stream as sites; a kind without a layer stands for every layer.

    Raises:
        SiteError: a place that the model does not have, or one inside a branch.
    """
    found = every_site(model, sites)
    for site in found:
        if site.is_inside:
            raise SiteError(
                f'"{site}" lies inside a branch, and a place on the stream is wanted here, such as '
                f'"{site.layer}.{site.branch}" or "{site.layer}.resid_post"; rs.read reads inside branches too'
            )
    return found


def every_site(model: ResidualModel, sites: str | Sequence[str]) -> list[Site]:
    """Site names as sites, on the stream and inside branches; a kind without a layer stands for every layer."""
    found: list[Site] = []
    for name in [sites] if isinstance(sites, str) else sites:
        names = [Site(layer, name) for layer in model.layers] if name in (*KINDS, *INSIDE) else [name]
        found += map(model.site, names)
    if not found:
        raise SiteError(f"no sites were asked for; name some, such as {listed((*ENDS, '0.resid_pre', 'resid_post'))}")
    return list(dict.fromkeys(found))


def check_final(model: ResidualModel, tokens: Tokens, logits: Float[Tensor, "prompt vocab"]) -> Check:
    """Hold logits at each prompt's last token against the model's own forward pass."""
    own = model.own_last_logits(tokens)
    return Check("base run = the model's own logits", relative_distance(logits, own), TOLERANCE[logits.dtype])


def _inside(
    trunk: Trunk, layer: int, x: Tensor, sites: Sequence[Site]
) -> tuple[Float[Tensor, "batch pos d_model"], dict[Site, Tensor]]:
    """What a layer puts out, and what is at sites inside its branches."""
    seen: dict[str, Tensor] = {}

    def keep(kind: str, value: Tensor) -> Tensor:
        seen[kind] = value.clone()  # what runs next may work in place
        return value

    kinds = {"z" if site.kind == "head" else site.kind for site in sites}
    post = trunk.layer(layer, x, {kind: partial(keep, kind) for kind in kinds})
    if any(site.kind == "head" for site in sites):
        seen["head"] = trunk.head_writes(layer, seen["z"])
    return post, {site: part_of(seen[site.kind], site) for site in sites}


def _checks(model: ResidualModel, tokens: Tokens, values: dict[Site, Tensor], logits: Tensor) -> list[Check]:
    """The logits against the model's own, and, where all parts were read, each layer's sum."""
    last = logits[range(len(tokens)), list(tokens.last)]
    checks = [check_final(model, tokens, last)]
    for layer in filter(model.adds_up, model.layers):
        parts = [values.get(Site(layer, kind)) for kind in ("resid_pre", "attn", "mlp", "resid_post")]
        if all(part is not None for part in parts):
            pre, attn, mlp, post = (part[tokens.mask] for part in parts if part is not None)
            error = relative_distance(pre + attn + mlp, post)
            checks.append(Check("pre + attn + mlp = post", error, TOLERANCE[post.dtype], where=f"layer {layer}"))
    return checks


def _worst(checks: Iterable[Check]) -> Check:
    # An error that is not a number is larger than none, so failing comes first.
    return max(checks, key=lambda check: (not check.passed, check.error))


def _keep(value: Tensor, site: Site, chosen: Tensor, tokens: Tokens, positions: Positions) -> Tensor:
    """The chosen positions of each prompt, moved to the front; zero beyond a prompt's end."""
    if positions is None:
        return value.masked_fill(~at_positions(tokens.mask, value, site), 0.0)
    counts, value = chosen.sum(dim=1), value.movedim(position_axis(site), 1)
    kept = value.new_zeros(len(value), int(counts.max()), *value.shape[2:])
    for row, count in enumerate(counts):
        kept[row, : int(count)] = value[row, chosen[row]]
    return kept.movedim(1, position_axis(site))
