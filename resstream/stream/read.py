"""Read the stream: what each layer found, what each branch wrote, and the logits they led to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import SiteError, listed
from resstream.models.tokens import Positions, Prompts, Tokens
from resstream.models.trunk import TOLERANCE, ResidualModel, Trunk, relative_distance
from resstream.sites import ENDS, KINDS, Site


@dataclass(frozen=True)
class Stream:
    """What was read off one forward pass; every tensor is a copy of its own.

    >>> import resstream as rs
    >>> stream = rs.read(rs.load("smollm2"), ["Hello", "Hello there, world"], sites=["embed", "final"])
    >>> stream.sites, stream.tokens.lengths, stream["final"].shape
    (('0.resid_pre', '29.resid_post'), (1, 4), torch.Size([2, 4, 576]))

    Attributes:
        tokens: the batch that was read, as token ids and strings.
        values: one tensor per site, "prompt kept d_model"; only the chosen positions are kept if some were chosen.
        logits: the model's logits at every position, "prompt pos vocab".
        check: how far the sum of what was read is from the model's own stream.
    """

    tokens: Tokens
    values: dict[Site, Float[Tensor, "prompt kept d_model"]]
    logits: Float[Tensor, "prompt pos vocab"]
    check: Check
    model: ResidualModel

    def __getitem__(self, name: str | Site) -> Float[Tensor, "prompt kept d_model"]:
        """The tensor of one site, such as stream["5.resid_post"].

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

    Args:
        model: a model from `load`, or one that is being edited.
        prompts: a text, several texts, or token ids.
        sites: places such as "5.resid_pre", "5.attn", "embed" or "final"; a name without a layer, such as
            "resid_post", means that place in every layer.
        positions: which positions to keep, counted within each prompt; all of them by default. Choosing the same
            number in each prompt gives tensors of that many positions.
    Returns:
        A Stream. Values beyond a shorter prompt's end are zero.
    Raises:
        SiteError: a place that the model does not have.
        PromptError: an empty or too long prompt, or a position that a prompt does not have.
    """
    tokens = model.tokenize(prompts)
    wanted = expand_sites(model, sites)
    chosen = tokens.at(positions)
    with torch.no_grad():
        values, final = trace(model, model.trunk(tokens), wanted)
        logits = model.readout(final)
        check = _check(model, tokens, values, logits)
    kept = {site: _keep(values[site], chosen, tokens, positions) for site in wanted}
    return Stream(tokens, kept, logits, check, model)


def trace(model: ResidualModel, trunk: Trunk, sites: Iterable[Site]) -> tuple[dict[Site, Tensor], Tensor]:
    """Run a trunk once; keep the stream at some sites, and what the readout reads.

    Whole layers are run even where their parts are asked for too, so boundaries are bit-equal to the model's own.
    """
    wanted = set(sites)
    values: dict[Site, Tensor] = {}
    x = trunk.x0
    for layer in trunk.order:
        x = trunk.at(Site(layer, "resid_pre"), x)
        found = {Site(layer, "resid_pre"): x, Site(layer, "resid_post"): trunk.layer(layer, x)}
        if wanted & {Site(layer, kind) for kind in ("attn", "mlp", "resid_mid")}:
            found[Site(layer, "attn")] = attn = trunk.write(Site(layer, "attn"), x)
            if model.layout == "sequential":
                found[Site(layer, "resid_mid")] = x = trunk.at(Site(layer, "resid_mid"), x + attn)
            found[Site(layer, "mlp")] = trunk.write(Site(layer, "mlp"), x)
        x = found[Site(layer, "resid_post")]
        values.update({site: value for site, value in found.items() if site in wanted})
    return values, x


def expand_sites(model: ResidualModel, sites: str | Sequence[str]) -> list[Site]:
    """Site names as sites; a kind without a layer stands for every layer."""
    found: list[Site] = []
    for name in [sites] if isinstance(sites, str) else sites:
        names = [Site(layer, name) for layer in model.layers] if name in KINDS else [name]
        found += map(model.site, names)
    if not found:
        raise SiteError(f"no sites were asked for; name some, such as {listed((*ENDS, '0.resid_pre', 'resid_post'))}")
    return list(dict.fromkeys(found))


def check_final(model: ResidualModel, tokens: Tokens, logits: Float[Tensor, "prompt vocab"]) -> Check:
    """Hold logits at each prompt's last token against the model's own forward pass."""
    own = model.own_logits(tokens)[range(len(tokens)), [length - 1 for length in tokens.lengths]]
    return Check("base run = the model's own logits", relative_distance(logits, own), TOLERANCE[logits.dtype])


def _check(model: ResidualModel, tokens: Tokens, values: dict[Site, Tensor], logits: Tensor) -> Check:
    """The worst of: the logits against the model's own, and, where all parts were read, each layer's sum."""
    last = logits[range(len(tokens)), [length - 1 for length in tokens.lengths]]
    checks = [check_final(model, tokens, last)]
    for layer in filter(model.adds_up, model.layers):
        parts = [values.get(Site(layer, kind)) for kind in ("resid_pre", "attn", "mlp", "resid_post")]
        if all(part is not None for part in parts):
            pre, attn, mlp, post = (part[tokens.mask] for part in parts if part is not None)
            error = relative_distance(pre + attn + mlp, post)
            checks.append(Check("pre + attn + mlp = post", error, TOLERANCE[post.dtype], where=f"layer {layer}"))
    # An error that is not a number is larger than none, so failing comes first.
    return max(checks, key=lambda check: (not check.passed, check.error))


def _keep(value: Tensor, chosen: Tensor, tokens: Tokens, positions: Positions) -> Tensor:
    """The chosen positions of each prompt, moved to the front; zero beyond a prompt's end."""
    if positions is None:
        return value.masked_fill(~tokens.mask[..., None], 0.0)
    counts = chosen.sum(dim=1)
    kept = value.new_zeros(len(value), int(counts.max()), value.shape[-1])
    for row, count in enumerate(counts):
        kept[row, : int(count)] = value[row, chosen[row]]
    return kept
