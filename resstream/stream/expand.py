"""The trunk as a sum over paths: the gradient at the end, taken down step by step, split by which hops it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from resstream.models.carry import UNCHANGED
from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel, Trunk
from resstream.sites import Site
from resstream.stream.pull import AT_ONCE, Part, Pullback, gradient, pull

# The most that the vectors of single paths may take at once, in bytes.
_BUDGET = 64 * 2**20
_LAYERS_AT_ONCE = 8


@dataclass(frozen=True)
class Step:
    """A place where a path either passes by or takes a hop; of each, the derivative at `x` is the factor on the path.

    Attributes:
        x: the stream that the step reads.
        hops: how the stream after the step depends on `x` through one branch, all else held at its value.
        kinds: what the hops are: "attn", "mlp" or "layer".
        layer: the layer that the step belongs to.
        carry: how the stream after the step depends on `x` past the branches; None where it is `x` and what they write.
    """

    x: Float[Tensor, "1 pos d_model"]
    hops: tuple[Part, ...]
    kinds: tuple[str, ...]
    layer: int
    carry: Part | None


@dataclass(frozen=True)
class Expansion:
    """One run of one prompt, ready to be expanded.

    Attributes:
        steps: from the start up, where a path can hop.
        top: the gradient of the metric at the last residual.
        blocks: the whole layers from the start up, from stream to stream, which know nothing of steps.
    """

    steps: Sequence[Step]
    top: Float[Tensor, "pos d_model"]
    blocks: Sequence[Part]

    @classmethod
    def of(
        cls,
        model: ResidualModel,
        alone: Tokens,
        score: Callable[[Tensor], Tensor],
        *,
        unit: Literal["write", "layer"],
        start: int = 0,
    ) -> Expansion:
        """Run one prompt and take its trunk apart.

        Args:
            model: the model, usually its float64 copy.
            alone: one prompt, without padding.
            score: from the last residuals, "1 pos d_model", to one number.
            unit: whether a step is a write (or the writes that read the same state), or a whole layer.
            start: the layer at whose input paths end.
        """
        order = range(start, model.n_layers)
        steps = []
        with torch.no_grad():
            trunk = model.trunk(alone)
            x = trunk.x0
            for layer in range(start):
                x = trunk.layer(layer, x)
            take: list[Callable[[Tensor], tuple[Step, Tensor]]]
            if unit == "layer":
                take = [partial(_layer, model, trunk, layer) for layer in order]
            else:
                take = [partial(_write, model, trunk, sites) for sites in model.steps if sites[0].layer >= start]
            for each in take:
                step, x = each(x)
                steps.append(step)
        return cls(steps, gradient(score, x), [partial(trunk.layer, layer) for layer in order])

    @property
    def widths(self) -> list[int]:
        """In how many ways a path can hop at each step."""
        return [len(step.hops) for step in self.steps]

    def backward(self) -> Float[Tensor, "pos d_model"]:
        """The gradient at the start by a plain backward pass through whole layers, some at a time to save memory."""
        entry = {step.layer: step.x for step in reversed(self.steps)}
        bottom, vector = self.steps[0].layer, self.top[None]
        for start in reversed(range(0, len(self.blocks), _LAYERS_AT_ONCE)):
            some = self.blocks[start : start + _LAYERS_AT_ONCE]
            vector = pull(partial(_through, some), entry[bottom + start], vector)
        return vector[0]

    def descend(
        self, signs: Float[Tensor, "probe step hop"] | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "probe length pos d_model"]]]:
        """The gradient at the input of each step, from the top one down, split by path length.

        c_k <- K^T c_k + J^T c_(k-1): the paths that pass by keep their length, those that hop grow by one. K is the
        factor of what the trunk does to the stream itself, and is left out where it does nothing.

        Args:
            signs: factors of 1 or -1 for each hop; each probe is a program of its own. One probe of ones by default.
        Yields:
            The step, and one gradient for each probe and length, until the next step is taken. The last is the start.
        """
        probes = 1 if signs is None else len(signs)
        # One block of memory for all steps: blocks that grow from step to step would leave gaps behind.
        split = self.top.new_zeros(1 + len(self.steps), probes, *self.top.shape)
        split[0] = self.top
        size = max(1, AT_ONCE // (probes * self.top.shape[0]))
        for done, number in enumerate(reversed(range(len(self.steps)))):
            step = self.steps[number]
            backs = [Pullback(part, step.x) for part in step.hops]
            passing = None if step.carry is None else Pullback(step.carry, step.x)
            # From the longest paths down, so that each length is read before it is added to.
            for start in reversed(range(0, done + 1, size)):
                old = split[start : min(start + size, done + 1)]
                hopped = torch.zeros_like(old)
                for hop, back in enumerate(backs):
                    pulled = back(old.flatten(0, 1)).view_as(old)
                    hopped += pulled if signs is None else signs[:, number, hop, None, None] * pulled
                if passing is not None:
                    old.copy_(passing(old.flatten(0, 1)).view_as(old))
                split[start + 1 : start + 1 + len(old)] += hopped
            yield number, split[: done + 2].transpose(0, 1)

    def by_branch(self) -> Float[Tensor, "attn mlp pos d_model"]:
        """The gradient at the start, split by the number of attention hops and the number of MLP hops."""
        split = self.top[None, None]
        for number, step in reversed(list(enumerate(self.steps))):
            passed = split if step.carry is None else pull(step.carry, step.x, split.flatten(0, 1)).view_as(split)
            new = pad(passed, (0, 0, 0, 0, 0, 1, 0, 1))
            for kind, part in zip(step.kinds, step.hops, strict=True):
                pulled = pull(part, step.x, split.flatten(0, 1)).view_as(split)
                new += pad(pulled, (0, 0, 0, 0, 0, 1, 1, 0) if kind == "attn" else (0, 0, 0, 0, 1, 0, 0, 1))
            # Of either kind there are at most as many hops as steps that offer it, so a full row of nothing is cut.
            offered = [sum(kind in step.kinds for step in self.steps[number:]) for kind in ("attn", "mlp")]
            split = new[: 1 + offered[0], : 1 + offered[1]]
        return split

    def of_paths(self, paths: Int[np.ndarray, "path step"]) -> Iterator[Float[Tensor, "path pos d_model"]]:
        """What single paths carry to the start, in pieces; a path names its hop at each step, or -1 to pass by.

        Paths that agree from the top down to a step have the same vector there, which is computed once.
        """
        size = max(1, _BUDGET // (self.top.numel() * self.top.element_size()))
        for piece in np.split(paths, range(size, len(paths), size)):
            vectors, owner = self.top[None], np.zeros(len(piece), dtype=int)
            for number, step in reversed(list(enumerate(self.steps))):
                branches, owner = np.unique(np.stack([owner, piece[:, number]]), axis=1, return_inverse=True)
                parents, hops = torch.from_numpy(branches)
                new = vectors[parents]
                for hop, part in [(-1, step.carry), *enumerate(step.hops)]:
                    if part is not None:
                        new[hops == hop] = pull(part, step.x, new[hops == hop])
                vectors = new
            yield vectors[torch.from_numpy(owner)]


def _write(
    model: ResidualModel, trunk: Trunk, sites: tuple[Site, ...], x: Float[Tensor, "1 pos d_model"]
) -> tuple[Step, Float[Tensor, "1 pos d_model"]]:
    """The step of the writes that read `x`, and the stream after it."""
    carry = model.carry(sites)
    hops: list[Part] = [partial(trunk.write, site) for site in sites]
    written = torch.stack([hop(x) for hop in hops])
    total = written.sum(0)
    if carry.after is not None:
        rests = [carry.passing(x) + total - own for own in written]
        hops = [partial(_landed, carry.after, rest, hop) for rest, hop in zip(rests, hops, strict=True)]
    passing = None if carry == UNCHANGED else partial(carry.add, written=total)
    step = Step(x, tuple(hops), tuple(site.kind for site in sites), sites[0].layer, passing)
    return step, carry.add(x, total)


def _layer(
    model: ResidualModel, trunk: Trunk, layer: int, x: Float[Tensor, "1 pos d_model"]
) -> tuple[Step, Float[Tensor, "1 pos d_model"]]:
    """The step of a whole layer, whose paths pass by where they pass by all of its branches; the stream after it."""
    groups = [sites for sites in model.steps if sites[0].layer == layer]
    held: list[Part] = []
    if any(model.carry(sites) != UNCHANGED for sites in groups):
        state = x
        for sites in groups:
            total = torch.stack([trunk.write(site, state) for site in sites]).sum(0)
            held.append(partial(model.carry(sites).add, written=total))
            state = held[-1](state)
    carry = partial(_through, held) if held else None
    return Step(x, (partial(_hop, trunk, layer, carry),), ("layer",), layer, carry), trunk.layer(layer, x)


def _landed(after: Part, rest: Tensor, hop: Part, x: Tensor) -> Tensor:
    """What a sum becomes of which one branch is free and the rest is held."""
    return after(rest + hop(x))


def _hop(trunk: Trunk, layer: int, carry: Part | None, x: Tensor) -> Tensor:
    """What a layer makes of the stream, less what passes by its branches."""
    return trunk.layer(layer, x) - (x if carry is None else carry(x))


def _through(parts: Sequence[Part], x: Tensor) -> Tensor:
    return reduce(lambda stream, part: part(stream), parts, x)
