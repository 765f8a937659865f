"""Three things that are called collapse: tokens that become equal, rows that pick one token, late layers that fade."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from tqdm.auto import tqdm

from resstream.lab.branches import Attention, Layer
from resstream.lab.experiments.parts.at_start import Sample, random_words
from resstream.lab.experiments.parts.attention_gradient import attention_gradient
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.nets import Net, transformer
from resstream.measure.vitals.stream_statistics import Passage, passage
from resstream.result import Result

LAYERS = 8
# From here on a token is the same as the mean token, a row has no entropy, a write is no part of the stream.
LEAST = 0.1
MEASURES = ("rank", "entropy", "writes")
_DONG = "Dong, Cordonnier and Loukas 2021, Attention is not all you need"
# A residual below this is rounding, and says nothing about attention.
_ROUNDING = 1e-14


@dataclass(frozen=True)
class _Kind:
    """A kind of net: its rule, whether its MLPs are more than a matrix, how sharp its attention is, and its depth."""

    rule: str
    mlps: bool = True
    sharpness: float = 1.0
    deep: bool = False


# Whose tokens are followed from layer to layer.
KINDS: Mapping[str, _Kind] = {
    "attention alone": _Kind("plain", mlps=False),
    "with MLPs": _Kind("plain"),
    "with skips": _Kind("residual", mlps=False),
    "Post-LN": _Kind("post_ln"),
    "Pre-LN": _Kind("pre_ln"),
}
# Each net, and the one thing of the three that collapses in it.
NETS: Mapping[str, tuple[_Kind, str]] = {
    "Pre-LN": (_Kind("pre_ln"), ""),
    "no skips": (_Kind("plain", mlps=False), "rank"),
    "sharp scores": (_Kind("pre_ln", sharpness=100.0), "entropy"),
    "deep Pre-LN": (_Kind("pre_ln", deep=True), "writes"),
    "deep LN scaling": (_Kind("ln_scaling", deep=True), "writes"),
}


def attention_collapse(*, depth: int = 96, seeds: int = 5, progress: bool = False) -> Result:
    """Build untrained Transformers in which one of three things collapses, and measure all three in each.

    >>> from resstream import lab
    >>> collapse = lab.experiments.attention_collapse(depth=80, seeds=1)
    >>> (collapse.data.left.isel(seed=0) < 0.1).values.astype(int)
    array([[0, 0, 0],
           [1, 0, 0],
           [0, 1, 0],
           [0, 0, 1],
           [0, 0, 1]])

    Attention without skips makes all tokens equal (rank collapse). Large scores make each row of a pattern pick one
    token, which no gradient can undo (entropy collapse). In a deep Pre-LN stack the stream grows, and late writes are
    small against it (dilution). The nets are 64 wide, with four heads that read all positions, 8 layers deep where it
    is not said otherwise, and read 4 prompts of 32 random words.

    Args:
        depth: number of layers of the deep nets.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result with `left` (net, measure, seed): "rank", how far tokens differ from their mean, relative, at the end;
        "entropy" of attention, a share of what is possible, a mean over heads; "writes", the size of a write against
        the stream, the median over the last quarter. `score_gradient` (net, seed) is the norm of the gradient at a
        row's scores over that at its pattern, the median over rows, and `residual` (kind, layer, seed) the first of the
        three measures layer by layer.
    Raises:
        LabError: no seeds, or no such net.
    Source:
        Dong et al. 2021, theorem 2.2; Zhai et al. 2023, Stabilizing Transformer training by preventing attention
        entropy collapse; Sun et al. 2025, The curse of depth.
    """
    left = np.empty((len(NETS), len(MEASURES), len(require_seeds(seeds))))
    passed, residual = np.empty((len(NETS), seeds)), np.empty((len(KINDS), LAYERS + 1, seeds))
    checks = []
    with tqdm(total=seeds * (len(NETS) + len(KINDS)), desc="collapse", disable=not progress) as bar:
        for seed in range(seeds):
            sample = random_words(4, 32, seed=seed)
            for place, kind in enumerate(KINDS.values()):
                residual[place, :, seed] = _residuals(_seen(_net(kind, depth, seed), sample))
                bar.update()
            for place, (kind, _) in enumerate(NETS.values()):
                net = _net(kind, depth, seed)
                left[place, :, seed] = _left(_seen(net, sample))
                gradient = attention_gradient(net, sample)
                passed[place, seed] = gradient.share
                checks.append(gradient.check)
                bar.update()
    data = xr.Dataset(
        {
            "residual": (("kind", "layer", "seed"), residual),
            "left": (("net", "measure", "seed"), left),
            "score_gradient": (("net", "seed"), passed),
        },
        coords={
            "net": list(NETS),
            "measure": list(MEASURES),
            "kind": list(KINDS),
            "layer": np.arange(LAYERS + 1),
            "seed": np.arange(seeds),
        },
    )
    own = ", ".join(
        f"{name} {float(data.left.sel(net=net, measure=name).mean()):.2g} in {net}"
        for net, name in [(net, name) for net, (_, name) in NETS.items() if name][:3]
    )
    return outcome(
        "attention_collapse",
        "untrained Transformers",
        data,
        views=[
            View("residual", "layer", "kind", "layer", "distance to the mean token", "y"),
            View("left", "net", "measure", "net", "what is left"),
            View("score_gradient", "net", "", "net", "gradient at the scores / at the pattern", "y"),
        ],
        claims=_claims(data),
        check=max(checks, key=lambda check: check.error),
        headline=f"three collapses, each in its own net: {own}",
        settings={"depth": depth, "seeds": seeds},
    )


def _net(kind: _Kind, depth: int, seed: int) -> Net:
    return transformer(
        kind.rule,
        layers=depth if kind.deep else LAYERS,
        attention=Attention(causal=False, sharpness=kind.sharpness),
        branch=None if kind.mlps else Layer("none"),
        seed=seed,
    )


def _seen(net: Net, sample: Sample) -> Passage:
    with torch.no_grad():
        return passage(net, net.tokenize(sample.ids), patterns=True)


def _residuals(seen: Passage) -> np.ndarray:
    """How far tokens differ from their mean, relative to their size, after each layer."""
    residuals: np.ndarray = seen.states["rank_residual"].mean(0)[::2]
    return residuals


def _left(seen: Passage) -> tuple[float, float, float]:
    writes = np.median(seen.writes["ratio"], axis=0)
    late = float(np.median(writes[-(len(writes) // 4) :]))
    return float(_residuals(seen)[-1]), float(seen.attention["entropy"].mean()), late


def _claims(data: xr.Dataset) -> list[Claim]:
    found = data.left.mean("seed")
    collapsed = {
        net: {str(name) for name in MEASURES if float(found.sel(net=net, measure=name)) < LEAST} for net in NETS
    }
    expected = {net: {name} - {""} for net, (_, name) in NETS.items()}
    apart = collapsed == expected
    shares = data.score_gradient.mean("seed")
    sharp, usual = (float(shares.sel(net=net)) for net in ("sharp scores", "Pre-LN"))
    stuck = sharp < usual / 10
    deep, scaled = (data.left.sel(net=net, measure="writes").values for net in ("deep Pre-LN", "deep LN scaling"))
    gains = bool(scaled.mean() > deep.mean())
    return [
        *_rank_claims(data.residual),
        Claim(
            "D9",
            "rank collapse, entropy collapse and dilution are three things: each net shows its own and no other",
            f"{_DONG}; Zhai et al. 2023; Sun et al. 2025",
            f"below {LEAST} in one place each",
            "; ".join(f"{net}: {', '.join(sorted(names)) or 'none'}" for net, names in collapsed.items()),
            judge(apart),
            "" if apart else "nets of this depth and sharpness do not keep them apart",
        ),
        Claim(
            "D9",
            "attention that picks one token passes less gradient to its scores than usual attention does",
            "Zhai et al. 2023, Stabilizing Transformer training by preventing attention entropy collapse",
            "less than a tenth in the median row",
            f"{sharp:.2g} of the gradient at the pattern; usually {usual:.2g}",
            judge(stuck),
            "" if stuck else "rows are not one-hot enough",
        ),
        Claim(
            "D9",
            "LayerNorm scaled by 1 / sqrt(layer) makes late writes larger against the stream",
            "a common reading of Sun et al. 2025, The curse of depth",
            f"more than the {deep.mean():.2g} of Pre-LN",
            spelled(scaled),
            judge(gains),
            ""
            if gains
            else "before training it makes the stream grow less, and late writes smaller still; what it is "
            "said to change is how much training makes the stream grow",
        ),
    ]


def _rank_claims(residual: xr.DataArray) -> list[Claim]:
    alone = np.exp(np.log(residual.sel(kind="attention alone").values).mean(-1))
    told = alone[alone > _ROUNDING]
    steps = np.log(told[2:]) / np.log(told[1:-1])
    doubly = len(steps) > 0 and bool((steps > 3).all())
    ends = {str(kind): residual.sel(kind=kind).isel(layer=-1).values for kind in residual.kind.values}
    skips, mlps = ends["with skips"], ends["with MLPs"]
    return [
        Claim(
            "D9",
            "without skips and MLPs tokens become equal doubly exponentially: each layer at least cubes what is left",
            f"{_DONG}, theorem 2.2",
            "the logarithm three times as large in each layer",
            f"{', '.join(f'{value:.2g}' for value in told)}, then rounding: "
            f"x {', '.join(f'{step:.1f}' for step in steps)}",
            judge(doubly),
            "" if doubly else "scores are too large for the bound to bite",
        ),
        Claim(
            "D9",
            f"skips prevent it: after {LAYERS} layers tokens still differ",
            f"{_DONG}, section 2.3",
            f"more than {LEAST}",
            spelled(skips),
            judge(bool(skips.mean() > LEAST)),
            "" if skips.mean() > LEAST else "attention outweighs the skip",
        ),
        Claim(
            "D9",
            "MLPs alone prevent it",
            f"a common reading of {_DONG}, section 2.3, which says that they slow it down",
            f"more than {LEAST}",
            spelled(mlps),
            judge(bool(mlps.mean() > LEAST)),
            ""
            if mlps.mean() > LEAST
            else "an MLP works on each token alone, and can keep apart only what attention has "
            "not yet made equal; it would have to multiply small differences by large factors",
        ),
    ]
