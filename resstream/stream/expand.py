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

from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel, Trunk
from resstream.stream.pull import AT_ONCE, Part, Pullback, gradient, pull

# The most that the vectors of single paths may take at once, in bytes.
_BUDGET = 64 * 2**20
_LAYERS_AT_ONCE = 8


@dataclass(frozen=True)
class Expansion:
    """One run of one prompt, ready to be expanded.

    Attributes:
        steps: for each step from the start up, the hops that a path can take there; it can also pass by.
        kinds: for each step, what its hops are: "attn", "mlp" or "layer".
        layers: for each step, the layer that it belongs to.
        inputs: the stream that each step reads.
        top: the gradient of the metric at the last residual.
        blocks: the whole layers from the start up, from stream to stream, which know nothing of steps.
    """

    steps: Sequence[tuple[Part, ...]]
    kinds: Sequence[tuple[str, ...]]
    layers: Sequence[int]
    inputs: Sequence[Float[Tensor, "1 pos d_model"]]
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
        with torch.no_grad():
            trunk = model.trunk(alone)
            x = trunk.x0
            for layer in range(start):
                x = trunk.layer(layer, x)
            groups = [step for step in model.steps if step[0].layer >= start]
            steps: list[tuple[Part, ...]] = [tuple(partial(trunk.write, site) for site in step) for step in groups]
            kinds = [tuple(site.kind for site in step) for step in groups]
            if unit == "layer":
                steps, kinds = [(partial(_layer_write, trunk, layer),) for layer in order], [("layer",)] * len(order)
            inputs = []
            for step in steps:
                inputs.append(x)
                x = x + torch.stack([hop(x) for hop in step]).sum(0)

        layers = list(order) if unit == "layer" else [step[0].layer for step in groups]
        return cls(steps, kinds, layers, inputs, gradient(score, x), [partial(trunk.layer, layer) for layer in order])

    @property
    def widths(self) -> list[int]:
        """In how many ways a path can hop at each step."""
        return [len(step) for step in self.steps]

    def backward(self) -> Float[Tensor, "pos d_model"]:
        """The gradient at the start by a plain backward pass through whole layers, some at a time to save memory."""
        entry = [self.layers.index(layer) for layer in sorted(set(self.layers))]
        vector = self.top[None]
        for start in reversed(range(0, len(self.blocks), _LAYERS_AT_ONCE)):
            some = self.blocks[start : start + _LAYERS_AT_ONCE]
            vector = pull(partial(_through, some), self.inputs[entry[start]], vector)
        return vector[0]

    def descend(
        self, signs: Float[Tensor, "probe step hop"] | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "probe length pos d_model"]]]:
        """The gradient at the input of each step, from the top one down, split by path length.

        c_k <- c_k + J^T c_(k-1): the paths that pass by keep their length, those that hop grow by one.

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
            backs = [Pullback(part, self.inputs[number]) for part in self.steps[number]]
            # From the longest paths down, so that each length is read before it is added to.
            for start in reversed(range(0, done + 1, size)):
                old = split[start : min(start + size, done + 1)]
                hopped = torch.zeros_like(old)
                for hop, back in enumerate(backs):
                    pulled = back(old.flatten(0, 1)).view_as(old)
                    hopped += pulled if signs is None else signs[:, number, hop, None, None] * pulled
                split[start + 1 : start + 1 + len(old)] += hopped
            yield number, split[: done + 2].transpose(0, 1)

    def by_branch(self) -> Float[Tensor, "attn mlp pos d_model"]:
        """The gradient at the start, split by the number of attention hops and the number of MLP hops."""
        split = self.top[None, None]
        for number in reversed(range(len(self.steps))):
            new = pad(split, (0, 0, 0, 0, 0, 1, 0, 1))
            for kind, part in zip(self.kinds[number], self.steps[number], strict=True):
                pulled = pull(part, self.inputs[number], split.flatten(0, 1)).view_as(split)
                new += pad(pulled, (0, 0, 0, 0, 0, 1, 1, 0) if kind == "attn" else (0, 0, 0, 0, 1, 0, 0, 1))
            # Of either kind there are at most as many hops as steps that offer it, so a full row of nothing is cut.
            offered = [sum(kind in step for step in self.kinds[number:]) for kind in ("attn", "mlp")]
            split = new[: 1 + offered[0], : 1 + offered[1]]
        return split

    def of_paths(self, paths: Int[np.ndarray, "path step"]) -> Iterator[Float[Tensor, "path pos d_model"]]:
        """What single paths carry to the start, in pieces; a path names its hop at each step, or -1 to pass by.

        Paths that agree from the top down to a step have the same vector there, which is computed once.
        """
        size = max(1, _BUDGET // (self.top.numel() * self.top.element_size()))
        for piece in np.split(paths, range(size, len(paths), size)):
            vectors, owner = self.top[None], np.zeros(len(piece), dtype=int)
            for number in reversed(range(len(self.steps))):
                branches, owner = np.unique(np.stack([owner, piece[:, number]]), axis=1, return_inverse=True)
                parents, hops = torch.from_numpy(branches)
                new = vectors[parents]
                for hop, part in enumerate(self.steps[number]):
                    new[hops == hop] = pull(part, self.inputs[number], new[hops == hop])
                vectors = new
            yield vectors[torch.from_numpy(owner)]


def _through(blocks: Sequence[Part], x: Tensor) -> Tensor:
    return reduce(lambda stream, block: block(stream), blocks, x)


def _layer_write(trunk: Trunk, layer: int, x: Tensor) -> Tensor:
    return trunk.layer(layer, x) - x
