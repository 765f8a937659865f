"""What each layer is worth to the loss, with the error of that figure, by running the model without it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from resstream.measure.labels import to_numpy
from resstream.measure.metrics import in_pieces, wide
from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.rows import Base, Row
from resstream.stream.run import run, score_all

# Neighbouring tokens' losses go together, so that the mean's error is taken from stretches of text, at most so many.
BLOCKS = 16
_MEMORY = 2**28


@dataclass(frozen=True)
class Worth:
    """The loss with all layers, and its change without each.

    Attributes:
        loss: of each prompt, with all layers, in nats.
        effect: its change without a layer; below 0 where the layer does harm.
        error: the standard error of the effect's mean over all stretches of text; NaN where there is only one.
        blocks: how many stretches there are.
    """

    loss: Float[np.ndarray, " prompt"]
    effect: Float[np.ndarray, "prompt layer"]
    error: Float[np.ndarray, " layer"]
    blocks: int


def layer_worth(model: ResidualModel, base: Base, *, progress: bool = False) -> Worth:
    """Leave each layer out once.

    Args:
        model: the model.
        base: its run, on prompts of two tokens or more.
        progress: whether to show a progress bar.
    """
    tokens, layers = base.tokens, range(model.n_layers)
    count = min(BLOCKS, min(tokens.lengths) - 1)
    cuts = [np.array_split(np.arange(length - 1), count) for length in tokens.lengths]
    scores = [partial(_loss, model, tokens, [cut[block] for cut in cuts]) for block in range(count)]
    baseline = score_all(scores, base)
    writes = [site for step in model.steps for site in step]
    without = [dict.fromkeys(site for site in writes if site.layer == layer) for layer in layers]
    rows = [
        Row(prompt, Site(layer, "resid_pre"), change=without[layer])
        for prompt in range(len(tokens))
        for layer in layers
    ]
    label = "leaving layers out" if progress else None
    found = run(model, base, rows, scores, baseline, memory=_MEMORY, progress=label)
    with_all = to_numpy(baseline)
    effects = to_numpy(found).reshape(len(tokens), len(layers), count) - with_all[:, None]
    weights = np.array([[len(block) for block in cut] for cut in cuts]) / (np.array(tokens.lengths)[:, None] - 1)
    every = np.moveaxis(effects, 1, 2).reshape(-1, len(layers))
    error = every.std(0, ddof=1) / np.sqrt(len(every)) if len(every) > 1 else np.full(len(layers), np.nan)
    return Worth((weights * with_all).sum(1), np.einsum("pb,plb->pl", weights, effects), error, len(every))


def _loss(
    model: ResidualModel, tokens: Tokens, places: Sequence[np.ndarray], final: Tensor, prompts: Sequence[int]
) -> Float[Tensor, " row"]:
    """Mean cross-entropy of the next tokens of a few positions of each row's prompt."""
    where = [(row, int(position)) for row, prompt in enumerate(prompts) for position in places[prompt]]
    rows, positions = torch.tensor(where, device=final.device).T
    owners = torch.tensor(list(prompts), device=final.device)[rows]
    residuals, targets = final[rows, positions], tokens.ids[owners, positions + 1]

    def piece(part: slice) -> Tensor:
        logits = wide(model.readout(residuals[part]))
        return torch.nn.functional.cross_entropy(logits, targets[part], reduction="none")

    losses = in_pieces(piece, len(rows), model)
    return losses.new_zeros(len(prompts)).index_add(0, rows, losses) / torch.bincount(rows, minlength=len(prompts))
