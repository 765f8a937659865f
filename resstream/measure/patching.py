"""Activation patching: which activation, moved from one run into another, carries the answer with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from resstream.check import Check
from resstream.measure.labels import to_numpy
from resstream.measure.metrics import Metric, as_metric, at_last
from resstream.measure.patches.cells import Cells, Choice
from resstream.measure.patches.effects import effect_grid, settings_of
from resstream.measure.patches.pairs import Direction, Pairs, require_direction
from resstream.measure.patches.transplant import kept_for, transplant
from resstream.models.tokens import Positions, Prompts
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.stream.edited import require_unedited
from resstream.stream.read import check_final
from resstream.stream.rows import Base
from resstream.stream.run import MEMORY, run, score_all


def patch_activations(
    model: ResidualModel,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric | Callable[[Tensor], Tensor] | Sequence[Metric | Callable[[Tensor], Tensor]],
    *,
    sites: str | Sequence[str] = "resid_pre",
    direction: Direction = "denoise",
    positions: Literal["each", "all"] | Positions | Sequence[Positions] = "each",
    layers: Choice = "each",
    heads: Choice = "each",
    neurons: Choice = "all",
    window: int = 1,
    memory: int = MEMORY,
    progress: bool = False,
) -> Result:
    """Replace one activation of one run by the other run's, for every layer and position, and measure what that does.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> grid = rs.patch_activations(
    ...     model,
    ...     "When Mary and John went to the store, John gave a drink to",
    ...     "When Mary and John went to the store, Mary gave a drink to",
    ...     rs.logit_diff(" Mary", " John"),
    ... )
    >>> grid.data.clean.round(decimals=3).item(), grid.data.corrupted.round(decimals=3).item()
    (6.12, -5.485)
    >>> grid.data.effect.shape
    (1, 1, 30, 14)

    Denoising moves clean activations into the corrupted run: an effect of 1 says that this activation is enough to
    restore the answer. Noising moves corrupted activations into the clean run: an effect of 1 says that the answer
    cannot do without it. The two differ, and neither implies the other.

    Args:
        model: a model from `load`.
        clean: prompts with the behaviour.
        corrupted: their partners, one by one, with as many tokens each; pairs may differ in length.
        metric: what to measure, such as `rs.logit_diff(...)`, or a function of the logits; or several of them.
        sites: kinds of place to patch, one or several: "resid_pre", "resid_mid", "resid_post", "attn", "mlp"; or, with
            an axis of heads, "head", "z", "q", "k", "v", "pattern"; or "neuron". A head is patched through its z.
        direction: "denoise" or "noise".
        positions: "each" position on its own, "all" at once, or one or more selectors, each on its own: a number
            (negative ones count from the end of each prompt), "last", or a piece of the clean text, such as " Eiffel".
        layers: "each", a number, or several.
        heads: "each" on its own, "all" at once, a number or several; keys and values have heads of their own count.
        neurons: "all" at once, "each" on its own, a number or several.
        window: how many layers are patched together, around each of the layers and cut off at the ends.
        memory: most bytes to take at once for runs and for the activations that they are made from.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, site, layer, head or neuron, position): `metric` in the metric's units and `effect`, which
        is 0 where the patch does nothing and 1 where it moves the metric all the way; over prompts, `clean` and
        `corrupted`; and over cells, `mean_effect` with the ends of its 95% interval over pairs. Where the two
        baselines coincide the effect is NaN. Axes along which all is patched at once are left out, and several
        metrics are an axis `metric_name`.
    Raises:
        PromptError: prompts of different lengths; the message shows both token lists.
        SiteError: no such place, layer or head, or sites that do not share their axes.
    Source:
        Meng et al. 2022 (ROME); Heimersheim and Nanda 2024, How to use and interpret activation patching.
    """
    require_direction(direction)
    require_unedited(model, "patch_activations")
    metrics = [as_metric(each) for each in (metric if isinstance(metric, Sequence) else [metric])]
    pairs = Pairs.of(model, clean, corrupted, metrics)
    cells = Cells.of(
        model, pairs, sites=sites, layers=layers, window=window, heads=heads, neurons=neurons, positions=positions
    )
    grid = np.full((len(metrics), len(pairs), *cells.shape), np.nan)
    ends = np.empty((len(metrics), 2, len(pairs)))
    checks = []
    for some, group in pairs.by_length(pairs.positions_at_once(model, kept_for(model, cells.whole), memory // 2)):
        found = _patched(
            model, group, cells.take(some), [each.take(some) for each in metrics], direction, memory, progress
        )
        grid[:, some], ends[:, :, some] = found[0], found[1]
        checks.append(found[2])
    data = effect_grid(cells, pairs, metrics, grid, ends, direction, several=isinstance(metric, Sequence))
    settings = settings_of(metrics, direction, positions) | {"window": window}
    check = max(checks, key=lambda each: (not each.passed, each.error))
    return Result("patch_activations", model.name, data.grid, check, data.headline, settings)


def _patched(
    model: ResidualModel,
    pairs: Pairs,
    cells: Cells,
    metrics: Sequence[Metric],
    direction: Direction,
    memory: int,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray, Check]:
    """The grid of some pairs of one length, their baselines, and how far their runs are from the model's own."""
    both = pairs.both
    base = Base.of(model, both, kept_for(model, cells.whole))
    scores = [pairs.bind(model, metric, base.final) for metric in metrics]
    baseline = score_all(scores, base)
    masks = cells.columns.masks(pairs.clean)
    after = torch.arange(both.width, device=both.ids.device)
    places, rows = [], []
    for pair in range(len(pairs)):
        target, donor = pairs.sides(pair, direction)
        apart = after >= pairs.first_difference(pair)
        for cell in cells.each(model):
            here = masks[cell.column, pair]
            if bool(here.any()):
                places.append((pair, *cell.place))
                rows.append(transplant(model, base, cell.sites, target, donor, here & apart))
    found = run(model, base, rows, scores, baseline, memory=memory // 2, progress="patching" if progress else None)
    grid = np.full((len(metrics), len(pairs), *cells.shape), np.nan)
    grid[(slice(None), *np.array(places).T)] = to_numpy(found.T)
    with torch.no_grad():
        check = check_final(model, both, model.readout(at_last(base.final, both, range(len(both)))))
    return grid, to_numpy(baseline.T).reshape(len(metrics), 2, len(pairs)), check
