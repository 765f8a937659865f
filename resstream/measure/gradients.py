"""Attribution patching: what every patch of a sweep would do, estimated from gradients, all cells at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from resstream.measure.metrics import Metric, as_metric
from resstream.measure.patches.cells import Cells, Choice
from resstream.measure.patches.effects import effect_grid, headline, settings_of
from resstream.measure.patches.gradient_sweep import Fix, Manner, Sweep, pairs_at_once
from resstream.measure.patches.pairs import Direction, Pairs, require_direction
from resstream.models.tokens import Positions, Prompts
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.stream.edited import require_unedited
from resstream.stream.run import MEMORY

_SIZES = "effect = the mean size of the estimate over passes that drop a layer, against the gap: it has no sign"


def attribution_patching(
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
    steps: int = 1,
    fix: Fix | Sequence[Fix] | None = None,
    memory: int = MEMORY,
    progress: bool = False,
) -> Result:
    """Estimate every cell of `patch_activations` from gradients: one backward pass stands in for all the patched runs.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> estimate = rs.attribution_patching(
    ...     model,
    ...     "When Mary and John went to the store, John gave a drink to",
    ...     "When Mary and John went to the store, Mary gave a drink to",
    ...     rs.logit_diff(" Mary", " John"),
    ...     sites="attn",
    ... )
    >>> estimate.data.effect.shape
    (1, 1, 30, 14)

    A cell's estimate is the sum, over all numbers that its patch would replace, of (donor's value - target's value)
    times the slope of the metric in that number; the target is the run that is patched, and the donor gives the value.
    With one step the slope is that of the target's own run, so a metric that saturates, or a softmax or norm on the
    way, is taken for a straight line.

    With more steps it is the mean of the slopes at the middles of that many equal pieces of the way from target to
    donor (integrated gradients). For each layer and kind of site, a way of its own is gone: the layer's whole value of
    that kind, at all positions and of all heads or neurons, moves in a straight line from the target's to the donor's,
    and everything above it follows; what is below, and beside it in the layer, stays the target's. With enough steps a
    layer's estimates therefore add up to what patching the layer's whole value does. By how much they miss that is
    `completeness`; it falls as steps grow.

    Two corrections make up AtP*. "qk" runs attention again for each query or key that is put in, up to z, the values
    that the pattern has mixed, and uses a slope only from there on: sum of (z with the donor's query or key - z) times
    the slope in z. A saturated softmax, whose slope is 0, so hides nothing. "drop" (GradDrop) finds effects in which
    ways through several layers cancel out. It pulls the slope back L times for L layers, each time without what one
    layer's branches pass on, while the stream passes by them; the estimate is the sum of the absolute values of these
    L estimates over L - 1. The pass that drops a value's own layer gives 0 for writes and for values inside branches,
    hence L - 1; states of the stream belong to no layer, and their sum is divided by L. These are sizes without a
    sign: `metric` is then the baseline moved towards the other run by that much, and `effect` is never negative.

    Args:
        model: a model from `load`.
        clean: prompts with the behaviour.
        corrupted: their partners, one by one, with as many tokens each; pairs may differ in length.
        metric: what to measure, such as `rs.logit_diff(...)`, or a function of the logits that has a gradient; or
            several of them.
        sites: kinds of place, one or several, as for `patch_activations`.
        direction: "denoise" or "noise".
        positions: as for `patch_activations`.
        layers: "each", a number, or several.
        heads: "each" on its own, "all" at once, a number or several; keys and values have heads of their own count.
        neurons: "all" at once, "each" on its own, a number or several.
        steps: how many points of the way slopes are taken at; 1 takes them at its start.
        fix: "qk", for queries and keys; "drop"; or both.
        memory: most bytes to take at once for runs, and for the activations and slopes that they need.
        progress: whether to show a progress bar.
    Returns:
        Result with the axes and variables of `patch_activations`; with several steps and no fix, also `completeness`
        over (prompt, site, layer): a layer's estimates together, at all positions and of all parts, minus what patching
        its whole value does, in the metric's units.
    Raises:
        PromptError: prompts of different lengths; the message shows both token lists.
        SiteError: no such place, layer or head, sites that do not share their axes, no steps, or a fix that does not
            apply.
        MetricError: a metric without a gradient.
    Source:
        Nanda 2023, Attribution patching; Syed et al. 2023; Sundararajan et al. 2017, Axiomatic attribution for deep
        networks, equation 1; Kramár et al. 2024, AtP*, sections 2.2, 3.1.1 and 3.1.2.
    """
    require_direction(direction)
    require_unedited(model, "attribution_patching")
    several = isinstance(metric, Sequence)
    metrics = [as_metric(each) for each in (metric if isinstance(metric, Sequence) else [metric])]
    pairs = Pairs.of(model, clean, corrupted, metrics)
    cells = Cells.of(
        model, pairs, sites=sites, layers=layers, window=1, heads=heads, neurons=neurons, positions=positions
    )
    manner = Manner.of(model, cells, steps, fix)
    estimate = np.full((len(metrics), len(pairs), *cells.shape), np.nan)
    ends = np.empty((len(metrics), 2, len(pairs)))
    missed = np.empty((len(metrics), len(pairs), *cells.shape[:2]))
    checks = []
    # Inside a caller's inference mode there would be no graphs, and so no slopes.
    with torch.inference_mode(False):
        at_once = pairs_at_once(model, pairs, cells, metrics, manner, memory // 2)
        for some, group in pairs.by_length(at_once * pairs.clean.width):
            own = [each.take(some) for each in metrics]
            sweep = Sweep.of(model, group, cells.take(some), own, manner, direction, rows=at_once)
            found = sweep.estimate(memory // 2, progress)
            estimate[:, some], ends[:, :, some], missed[:, some] = found.grid, found.ends, found.missed
            checks.append(found.check)
    data, words = _labelled(
        cells, pairs, metrics, estimate, ends, direction, several=several, sizes="drop" in manner.fixes
    )
    settings = settings_of(metrics, direction, positions) | {"steps": steps, "fix": list(manner.fixes)}
    if "drop" in manner.fixes:
        settings["sign"] = _SIZES
    if manner.complete:
        miss = xr.DataArray(missed, dims=("metric_name", "prompt", "site", "layer"))
        data["completeness"] = miss.transpose("prompt", "metric_name", ...) if several else miss[0]
        words += f"; {_worst(miss[0], cells, metrics[0].units)}"
    check = max(checks, key=lambda each: (not each.passed, each.error))
    return Result("attribution_patching", model.name, data, check, f"estimated {words}", settings)


def _labelled(
    cells: Cells,
    pairs: Pairs,
    metrics: Sequence[Metric],
    estimate: Float[np.ndarray, "metric prompt site layer part position"],
    ends: Float[np.ndarray, "metric side prompt"],
    direction: Direction,
    *,
    several: bool,
    sizes: bool,
) -> tuple[xr.Dataset, str]:
    """The grid that the estimates come to from the target's baseline, and its strongest cell in words."""
    side = 1 if direction == "denoise" else 0
    # A size moves the metric towards the other run: where that is downwards, everything is turned over and back.
    turn = np.where(sizes & (ends[:, 1 - side] < ends[:, side]), -1.0, 1.0)
    start = ends[:, side] * turn
    grid = start[..., None, None, None, None] + estimate
    found = effect_grid(cells, pairs, metrics, grid, ends * turn[:, None], direction, several=several)
    back = xr.DataArray(turn, dims=("metric_name", "prompt")) if several else xr.DataArray(turn[0], dims="prompt")
    turned = {
        name: (found.grid[name] * back).transpose(*found.grid[name].dims) for name in ("metric", "clean", "corrupted")
    }
    data = found.grid.assign(turned)
    first = data.isel(metric_name=0) if several else data
    return data, headline(first, direction, metrics[0].units) + (", in size only" if sizes else "")


def _worst(missed: xr.DataArray, cells: Cells, units: str) -> str:
    """How far a layer's estimates together are from patching its whole value, where it is worst."""
    size = abs(missed).max("prompt")
    worst = size.argmax(...)
    place = f"{cells.layers[int(worst['layer'])]}.{cells.kinds[int(worst['site'])]}"
    return f"a whole layer's estimate is off by at most {float(size.max()):.2g} {units} (at {place})"
