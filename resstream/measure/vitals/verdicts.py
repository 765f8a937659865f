"""Verdicts: the pitfalls of residual networks, each looked for in figures, with the evidence and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xarray as xr

# Independent writes of constant size at most double a variance over the upper half of a stack, and writes that all
# point the same way quadruple it. What is beyond that multiplies with depth.
MULTIPLIES = 5.0
# A write of half the stream's own size: as large as it is meant to be nowhere but at the very start.
LARGE_WRITE = 0.5
# Where depth does no harm the gradient at the input is no smaller than at the output; Post-LN halves it in some ten
# layers of attention that averages.
GRADIENT_KEPT = 0.5
# Tokens that differ from their mean by less than this part of their size are the same to what reads them,
RANK_LEFT = 0.1
# if that is not how they came in: a prompt may repeat one word.
RANK_LOST = 3.0
# A head that looks at one token has no entropy; in a healthy model some heads do, such as those of the previous token.
ONE_HOT = 0.1
MANY_HEADS = 0.5
# A late write that turns the stream by less than one degree,
TINY_WRITE = 0.02
# where independent writes of constant size fall by 2.6 from the first quarter of a stack to the last, and writes that
# all point the same way by 7.
DILUTED = 10.0
# A tenth of what a usual late write is, and what some 70 additions in bfloat16 cost.
DRIFT = 0.01
# A ReLU at the end of a branch gives 1, a GELU 0.7, a SiLU 0.5; entries of random signs 1 / sqrt(width).
ONE_SIDED = 0.45
MANY_WRITES = 0.5
# Chance gives five standard errors once in some 10000 layers, with the 16 stretches of one prompt.
SURE = 5.0
FEWEST_BLOCKS = 5
# What is gained has to be worth the while, a twentieth of the loss,
GAIN = 0.05
# and to stand out: where half of the layers are in the way, it is not one of them.
STANDS_OUT = 3.0


@dataclass(frozen=True)
class About:
    """What verdicts need to know besides the figures.

    Attributes:
        dtype: the type in which the model was given.
        carries: what its trunk does to the stream itself, each kind once.
        misfits: writes that have not the stream's shape.
        guess: the loss of one who knows nothing but how often each token follows in these prompts, in nats.
        blocks: from how many stretches of text the error of a layer's effect was taken.
        missing: for each variable that could not be measured, why not.
    """

    dtype: str
    carries: Sequence[str]
    misfits: Sequence[str]
    guess: float
    blocks: int
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether a pitfall was found, the figures that say so, and what to do about it."""

    pitfall: str
    found: bool
    evidence: str
    advice: str


def verdicts(data: xr.Dataset, about: About) -> list[Verdict]:
    """Look for every pitfall.

    Args:
        data: the variables of `stream_health`.
        about: what the figures are of.
    """
    return [Verdict(pitfall, *look(data, about), advice) for pitfall, (look, advice) in _PITFALLS.items()]


def _shape(data: xr.Dataset, about: About) -> tuple[bool, str]:
    if about.misfits:
        return True, f"not of the stream's shape, and spread over it: {', '.join(about.misfits)}"
    return False, f"all {data.sizes['write']} writes have the stream's shape, and their sum is the model's own stream"


def _branch_init(data: xr.Dataset, about: About) -> tuple[bool, str]:
    variance = data.variance.median("prompt").values
    # A stream that overflows has grown up to there.
    variance = variance[np.isfinite(variance)]
    upper = variance[len(variance) // 2 :]
    steps = upper[1:] / upper[:-1]
    # By the usual step, so that one layer that writes much is not taken for all of them.
    usual = float(np.median(steps[steps != 1])) if (steps != 1).any() else 1.0
    growth = usual ** int((steps != 1).sum())
    sizes = _writes_that_write(data)
    least = float(np.quantile(sizes, 0.25)) if sizes.size else 0.0
    found = least > LARGE_WRITE and not growth <= MULTIPLIES
    return found, (
        f"the usual step takes the variance x {usual:.3g}, all of the upper half x {growth:.3g} (writes of constant "
        f"size: x 2 to 4); three writes in four are {least:.2g} of the stream or more"
    )


def _post_norm(data: xr.Dataset, about: About) -> tuple[bool, str]:
    if "norm" not in about.carries:
        return False, "no norm on the trunk"
    collapsed, tokens = _tokens_collapse(data)
    if "gradient_norm" in about.missing:
        return collapsed, f"a norm on the trunk; {tokens}; gradient not measured: {about.missing['gradient_norm']}"
    ends = data.gradient_norm.isel(site=[0, -1]).values
    kept = float(np.exp(np.log(ends[:, 0] / ends[:, 1]).mean()))
    said = f"a norm on the trunk; the gradient at the input is {kept:.2g} of that at the output; {tokens}"
    return kept < GRADIENT_KEPT or collapsed, said


def _rank(data: xr.Dataset, about: About) -> tuple[bool, str]:
    collapsed, said = _tokens_collapse(data)
    # Each norm of the sum shrinks the skip, which is what keeps tokens apart: one fault with one name.
    blamed = collapsed and "norm" in about.carries
    return collapsed and not blamed, f"{said}; the norm on the trunk shrinks the skip" if blamed else said


def _tokens_collapse(data: xr.Dataset) -> tuple[bool, str]:
    """Whether tokens become equal on the way up."""
    left = data.rank_residual.median("prompt").values
    if np.isnan(left).any():
        return False, "tokens cannot be compared: there is but one a prompt that counts, or the stream overflows"
    cosine = float(data.token_cosine.isel(site=-1).median())
    return bool(left[-1] < RANK_LEFT and left[0] > RANK_LOST * left[-1]), (
        f"tokens differ from their mean by {left[0]:.2g} of their size at the input, {left[-1]:.2g} at the output "
        f"(mean cosine {cosine:.2g})"
    )


def _entropy(data: xr.Dataset, about: About) -> tuple[bool, str]:
    if "entropy" in about.missing:
        return False, f"not measured: {about.missing['entropy']}"
    entropy, first = data.entropy.mean("prompt").values, data.first_share.mean("prompt").values
    stuck = float(((entropy < ONE_HOT) & (first < 0.5)).mean())
    return stuck > MANY_HEADS, (
        f"{stuck:.0%} of heads look at one token that is not the first; mean entropy {np.nanmean(entropy):.2g} of what "
        f"is possible, {np.nanmean(first):.0%} of attention on position 0"
    )


def _dilution(data: xr.Dataset, about: About) -> tuple[bool, str]:
    sizes = _writes_that_write(data)
    if sizes.size < 4:
        return False, f"only {sizes.size} writes that add anything"
    quarter = len(sizes) // 4
    early, late = float(np.median(sizes[:quarter])), float(np.median(sizes[-quarter:]))
    found = late < TINY_WRITE and early > DILUTED * late
    return found, f"a write is {early:.2g} of the stream in the first quarter, {late:.2g} in the last (medians)"


def _low_precision(data: xr.Dataset, about: About) -> tuple[bool, str]:
    known = about.dtype in data.precision.values and "trunk_drift" not in about.missing
    lost = data.trunk_drift.sel(precision=about.dtype) if known else data.own_drift
    drift = float(lost.isel(site=-1).median())
    if np.isnan(drift):
        return False, "not measured: the trunk does more than add, and has no copy in float32, or the stream overflows"
    others = [str(name) for name in data.precision.values if name != about.dtype]
    would = [f"in {name} it would be {_last(data.trunk_drift, name):.2g}" for name in others]
    rounding = "; the trunk is rounded on the way" if "rounding" in about.carries else ""
    own = f"its additions alone have moved the stream by {drift:.2g} of its size ({about.dtype}{rounding})"
    return drift > DRIFT, "; ".join([own, *(each for each in would if "nan" not in each)])


def _activation(data: xr.Dataset, about: About) -> tuple[bool, str]:
    sided = data.one_sided.median("prompt")
    kinds = np.array([str(name).rpartition(".")[2] for name in data.write.values])
    share = {
        kind: float((own > ONE_SIDED).mean())
        for kind in ("attn", "mlp")
        if (own := sided.values[(kinds == kind) & np.isfinite(sided.values)]).size
    }
    on_trunk = "activation" in about.carries
    most = max(share.values(), default=0.0)
    said = (
        f"entries of one sign in {most:.0%} of the writes of a branch, {float(sided.median()):.2g} of a write (median)"
    )
    return on_trunk or most > MANY_WRITES, f"an activation on the trunk; {said}" if on_trunk else said


def _polluting(data: xr.Dataset, about: About) -> tuple[bool, str]:
    effect = data.effect.mean("prompt").values
    least = int(effect.argmin())
    without = float(data.loss.mean()) + effect
    said = f"the most that leaving out one layer gains is {max(0.0, -float(effect[least])):.3g} nats"
    if about.blocks < FEWEST_BLOCKS:
        return False, f"{said}; too few tokens to tell it from chance"
    gain = np.maximum(-effect, 0.0)
    sure = gain > SURE * data.effect_error.values
    worth = (gain > GAIN * float(data.loss.mean())) & (gain > STANDS_OUT * np.median(gain))
    # A model that guesses, or worse, gains by writing less, whichever layer that is.
    clear = sure & worth & (without < about.guess)
    if not clear.any():
        return False, f"{said} (layer {least}, ± {data.effect_error.values[least]:.1g})"
    named = [
        f"layer {layer} (without it {effect[layer]:+.2g} ± {data.effect_error.values[layer]:.1g} nats)"
        for layer in np.flatnonzero(clear)
    ]
    return True, f"{', '.join(named)}, of a loss of {float(data.loss.mean()):.3g}"


_PITFALLS: dict[str, tuple[Callable[[xr.Dataset, About], tuple[bool, str]], str]] = {
    "shape mismatch": (_shape, "project each branch's output to the stream's shape instead of letting it be spread"),
    "large branches at init": (
        _branch_init,
        "norm what a branch reads, or start its last layer at zero or at 1 / sqrt(2 x layers) of its size",
    ),
    "Post-LN without warm-up": (
        _post_norm,
        "move the norm into the branch (Pre-LN), scale the skip as DeepNorm does, or warm the learning rate up",
    ),
    "rank collapse": (_rank, "keep the skip at full strength, and the MLPs between attention layers"),
    "entropy collapse": (_entropy, "bound the attention logits: norm queries and keys, or decay their weights"),
    "depth dilution": (
        _dilution,
        "scale what late branches read or write, such as LayerNorm by 1 / sqrt(depth), or use fewer layers",
    ),
    "low-precision trunk": (_low_precision, "keep the stream in float32, and only the branches in low precision"),
    "activate-then-add": (_activation, "let a branch end in a linear map, and leave nothing after the addition"),
    "a polluting layer": (_polluting, "leave the layer out, or train it again; patch its writes to see what it harms"),
}


def _writes_that_write(data: xr.Dataset) -> np.ndarray:
    """The sizes of all writes that add anything, in order, as far up as they are numbers."""
    sizes: np.ndarray = data.ratio.median("prompt").values
    return sizes[np.isfinite(sizes) & (sizes != 0)]


def _last(drift: xr.DataArray, precision: str) -> float:
    return float(drift.sel(precision=precision).isel(site=-1).median())
