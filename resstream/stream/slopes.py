"""Slopes: how a score moves with every value of a run, pulled back from the top through one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.models.trunk import ResidualModel, Trunk, relative_distance
from resstream.sites import INSIDE, Site
from resstream.stream.pull import AT_ONCE
from resstream.stream.rows import Base


@dataclass(frozen=True)
class Course:
    """One run of a batch from a layer on, of which only the states between layers are kept.

    Attributes:
        model: the model that runs.
        trunk: its trunk, opened for the batch.
        start: the first layer that is run.
        states: the stream that each layer reads from there on, and what the last one leaves.
        put: values that the run has at sites of its first layer in place of its own.
    """

    model: ResidualModel
    trunk: Trunk
    start: int
    states: Sequence[Float[Tensor, "batch pos d_model"]]
    put: Mapping[Site, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ResidualModel, base: Base, prompts: Sequence[int], *, start: int = 0) -> Course:
        """The base run of some prompts, from a layer on."""
        sites = [Site(layer, "resid_pre") for layer in range(start, model.n_layers)]
        states = [base.values[site][list(prompts)] for site in sites]
        with torch.no_grad():
            trunk = model.trunk(base.tokens.take(prompts))
        return cls(model, trunk, start, [*states, base.final[list(prompts)]])

    @classmethod
    def through(cls, model: ResidualModel, base: Base, prompts: Sequence[int], site: Site, value: Tensor) -> Course:
        """The runs of some prompts that have another value at a site, from its layer on."""
        entry, put = Site(site.layer, "resid_pre"), {site: value}
        with torch.no_grad():
            trunk = model.trunk(base.tokens.take(prompts))
            states = [base.values[entry][list(prompts)]]
            states.append(_apart(model, trunk, site.layer, states[0], (), put)[Site(site.layer, "resid_post")].detach())
            for layer in range(site.layer + 1, model.n_layers):
                states.append(trunk.layer(layer, states[-1]))
        return cls(model, trunk, site.layer, states, put)

    @property
    def final(self) -> Float[Tensor, "batch pos d_model"]:
        """What the readout reads."""
        return self.states[-1]


@dataclass(frozen=True)
class Slopes:
    """The slopes of some scores in values of one layer.

    Attributes:
        layer: the layer.
        at: for each site that was asked for, "pass score batch ..." with the axes of its value. The first pass is
            plain. Where branches are dropped, one pass follows for each layer from the last one down to this one, in
            which the gradient through its branches is stopped; dropping a layer further down changes nothing here.
        drift: how far the layer, taken apart, is from the run: the largest difference, relative.
    """

    layer: int
    at: Mapping[Site, Float[Tensor, "pass score batch ..."]]
    drift: float


def descend(
    course: Course, top: Float[Tensor, "score batch pos d_model"], sites: Sequence[Site], *, drop: bool = False
) -> Iterator[Slopes]:
    """Pull the slopes of scores back from the last residual, layer by layer, each of which is run again meanwhile.

    Only one layer's graph is held at a time, so that depth costs no memory.

    Args:
        course: the run.
        top: the slope of each score in the last residuals.
        sites: where slopes are wanted.
        drop: whether passes are added that stop the gradient through one layer's branches each.
    Yields:
        The slopes of each layer, from the last one down to the first that is run.
    """
    down = top[None]
    for layer in reversed(range(course.start, course.model.n_layers)):
        here = [site for site in sites if site.layer == layer]
        entry, output = Site(layer, "resid_pre"), Site(layer, "resid_post")
        place = layer - course.start
        below = [entry] if place else []
        with torch.enable_grad():
            x = course.states[place].detach().requires_grad_()
            put = {} if place else course.put
            values = _apart(course.model, course.trunk, layer, x, here, put)
            wanted = dict.fromkeys([*here, *below])
            found = dict(
                zip(wanted, pull_through(values[output], [values[site] for site in wanted], down), strict=True)
            )
        if drop:
            stopped = _past(course.model, layer, values, down[:1])
            for site, plain in found.items():
                found[site] = torch.cat([plain, stopped.get(site.kind, torch.zeros_like(plain[:1]))])
        drift = relative_distance(values[output].detach(), course.states[place + 1])
        yield Slopes(layer, {site: found[site] for site in here}, drift)
        down = found[entry] if below else down


def pull_through(
    out: Float[Tensor, "batch pos d_model"],
    inputs: Sequence[Tensor],
    vectors: Float[Tensor, "pass score batch pos d_model"],
) -> list[Float[Tensor, "pass score batch ..."]]:
    """Multiply vectors by the transposed Jacobians of an output in several of the values that it was made from."""
    flat = vectors.flatten(0, 1)
    size = max(1, AT_ONCE // max(1, out.shape[0] * out.shape[1]))
    pieces = [_pull_some(out, inputs, some) for some in flat.split(size)]
    return [torch.cat(each).unflatten(0, vectors.shape[:2]) for each in zip(*pieces, strict=True)]


def _pull_some(out: Tensor, inputs: Sequence[Tensor], vectors: Tensor) -> Sequence[Tensor]:
    # A trunk that lets nothing pass leaves values below it without any way to the output.
    back = partial(torch.autograd.grad, out, inputs, retain_graph=True, allow_unused=True)
    if len(vectors) > 1:
        try:
            found = back(vectors, is_grads_batched=True)
        except RuntimeError:
            # Some backward kernels cannot be batched; one vector at a time gives the same numbers.
            pass
        else:
            nothing = [value.new_zeros(len(vectors), *value.shape) for value in inputs]
            return [none if own is None else own for own, none in zip(found, nothing, strict=True)]
    each = [back(vector, materialize_grads=True) for vector in vectors]
    return [torch.stack(found) for found in zip(*each, strict=True)]


def _apart(
    model: ResidualModel, trunk: Trunk, layer: int, x: Tensor, sites: Sequence[Site], put: Mapping[Site, Tensor]
) -> dict[Site, Tensor]:
    """Run a layer write by write, and keep its states, its writes and the values inside that are asked for.

    Each value is a tensor of its own, so that its slope does not mix with another's that happens to be the same tensor.
    """
    values: dict[Site, Tensor] = {}

    def at(site: Site, own: Tensor) -> Tensor:
        value = put[site].to(own).detach() if site in put else own.clone()
        values[site] = value if value.requires_grad else value.requires_grad_()
        return values[site]

    steps = [step for step in model.steps if step[0].layer == layer]
    # A branch that is in no step writes nothing, and what it would move by writing can be asked for all the same.
    idle = {site for site in sites if site.is_write and not any(site in step for step in steps)}
    inside = {site for site in (*sites, *put) if site.kind in INSIDE}
    x = at(Site(layer, "resid_pre"), x)
    for step in steps:
        written = torch.zeros_like(x)
        for write in (*step, *idle):
            read: dict[str, Callable[[Tensor], Tensor]] = {
                site.kind: partial(at, site) for site in inside if site.branch == write.kind
            }
            written = written + at(write, trunk.write(write, x, read) if read else trunk.write(write, x))
        x = model.carry(step).add(x, written)
        if step[-1].kind == "attn":
            x = at(Site(layer, "resid_mid"), x)
    at(Site(layer, "resid_post"), x)
    return values


def _past(
    model: ResidualModel, layer: int, values: Mapping[Site, Tensor], vectors: Tensor
) -> dict[str, Float[Tensor, "pass score batch pos d_model"]]:
    """Vectors pulled back past a layer's branches, which hold what they write: by the stream alone, to each state."""
    with torch.enable_grad():
        x = values[Site(layer, "resid_pre")].detach().requires_grad_()
        states = {"resid_pre": x}
        for step in [step for step in model.steps if step[0].layer == layer]:
            written = torch.stack([values[write].detach() for write in step]).sum(0)
            x = model.carry(step).add(x, written)
            x = x if x.requires_grad else x.requires_grad_()
            states["resid_mid" if step[-1].kind == "attn" else "resid_post"] = x
        return dict(zip(states, pull_through(x, list(states.values()), vectors), strict=True))
