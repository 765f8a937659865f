"""Pre-LN against Post-LN before training: how the gradient is spread over the layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.lab.branches import Attention
from resstream.lab.experiments.parts.at_start import at_start, random_words, require_depths
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.slopes import check_slope
from resstream.lab.nets import Net, transformer
from resstream.result import Result

RULES = ("pre_ln", "post_ln")
# The depth at which the claims about single nets are tested.
DEEP = 24
_XIONG = "Xiong et al. 2020, On layer normalization in the Transformer architecture, theorem 1"


def norm_placement(*, depths: Sequence[int] = (6, DEEP, 96), seeds: int = 10, progress: bool = False) -> Result:
    """Measure the gradient in each layer of untrained Transformers with norms before the branches or after the sums.

    >>> from resstream import lab
    >>> norms = lab.experiments.norm_placement(depths=[6], seeds=2)
    >>> norms.data.last.dims, norms.check.passed
    (('rule', 'depth', 'seed'), True)

    The nets are 64 wide, with four heads that read all positions, 256 ReLU neurons and a vocabulary of 100; they read
    8 prompts of 32 random words, with random labels.

    Args:
        depths: numbers of layers.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result with `gradient` (rule, boundary, seed), the norm of the loss's gradient with respect to the stream, by
        layer, over that at the end, in nets of the depth nearest to 24; over (rule, depth, seed): `last` and `first`,
        its norm with respect to the last and the first MLP's second matrix, `last_scaled`, `last` times the root of the
        depth, and `in_out`, the stream's at the input over that at the end.
    Raises:
        LabError: no seeds, or no such net.
    Source:
        Xiong et al. 2020, On layer normalization in the Transformer architecture, theorem 1 and section 3.
    """
    chosen = require_depths(depths)
    shown = min(chosen, key=lambda depth: abs(depth - DEEP))
    cells = np.empty((3, len(RULES), len(chosen), len(require_seeds(seeds))))
    profile = np.empty((len(RULES), shown + 1, seeds))
    with tqdm(total=cells[0].size, desc="norm placement", disable=not progress) as bar:
        for place, depth, seed in ((p, d, s) for p in range(len(RULES)) for d in chosen for s in range(seeds)):
            ends = f"{depth - 1}.mlp.out", "0.mlp.out"
            found = at_start(_net(RULES[place], depth, seed), random_words(8, 32, seed=seed), list(dict.fromkeys(ends)))
            cells[:, place, chosen.index(depth), seed] = *(found.weights[name] for name in ends), found.in_over_out
            if depth == shown:
                profile[place, :, seed] = found.gradient / found.gradient[-1]
            bar.update()
    dims = ("rule", "depth", "seed")
    data = xr.Dataset(
        {
            "gradient": (("rule", "boundary", "seed"), profile),
            "last": (dims, cells[0]),
            "first": (dims, cells[1]),
            "in_out": (dims, cells[2]),
            "last_scaled": (dims, cells[0] * np.sqrt(chosen)[:, None]),
        },
        coords={"rule": list(RULES), "depth": chosen, "seed": np.arange(seeds), "boundary": np.arange(shown + 1)},
    )
    claims = [] if len(chosen) < 2 else [_shrinks(data)]
    if DEEP in chosen:
        claims += [_decays(data), _explodes(data)]
    passed = np.exp(np.log(cells[2]).mean(-1))[:, chosen.index(shown)]
    sample = random_words(8, 32)
    return outcome(
        "norm_placement",
        "untrained Transformers",
        data,
        views=[
            View("gradient", "boundary", "rule", "layer", "gradient / gradient at the end", "y"),
            View("last_scaled", "depth", "rule", "layers", "last MLP's gradient x sqrt(layers)", "xy"),
            View("in_out", "depth", "rule", "layers", "gradient at the input / at the end", "xy"),
        ],
        claims=claims,
        check=check_slope([net := _net(rule, shown, 0) for rule in RULES], sample.task(net)),
        headline=(
            f"gradient at the input over that at the end of {shown} layers: "
            + ", ".join(f"{rule} {value:.2g}" for rule, value in zip(RULES, passed, strict=True))
        ),
        settings={"seeds": seeds},
    )


def _net(rule: str, depth: int, seed: int) -> Net:
    return transformer(rule, layers=depth, attention=Attention(causal=False), seed=seed)


def _shrinks(data: xr.Dataset) -> Claim:
    """Pre-LN's last layer: the power of the depth that its gradient follows, net by net."""
    logs = np.log(data["last"].sel(rule="pre_ln").values)
    powers = np.polyfit(np.log(data.depth.values), logs, 1)[0]
    # Gradients of single nets scatter by a sixth: over a factor of 16 in depth that moves the power by some 0.06.
    holds = abs(float(powers.mean()) + 0.5) < 0.1
    means = np.exp(np.log(data.last_scaled.sel(rule="pre_ln").values).mean(-1))
    return Claim(
        "C5",
        "with Pre-LN the gradient of the last layer falls like 1 / sqrt(layers)",
        _XIONG,
        "a power of -0.5; times sqrt(layers) constant",
        f"a power of {spelled(powers)}; times sqrt(layers) {' / '.join(f'{mean:.2f}' for mean in means)} at "
        f"{', '.join(map(str, data.depth.values))} layers",
        judge(holds),
        "" if holds else "the depths are too small for the leading term",
    )


def _decays(data: xr.Dataset) -> Claim:
    own = data.sel(rule="post_ln", depth=DEEP)
    ratio = (own["last"] / own["first"]).values
    holds = _mean(own.in_out.values) < 0.5 and _mean(ratio) > 2
    return Claim(
        "C5",
        f"with Post-LN the gradient decays towards the input of {DEEP} layers",
        _XIONG,
        "at the input less than half of that at the end; the last MLP's more than twice the first's",
        f"{spelled(own.in_out.values, scale='log')}; {spelled(ratio, scale='log')}",
        judge(holds),
        "" if holds else "its decay needs branches that pass more forward than backward, as averaging attention does",
    )


def _explodes(data: xr.Dataset) -> Claim:
    """A gradient that grew exponentially with depth would do so from one depth to the next."""
    last = np.exp(np.log(data["last"].sel(rule="post_ln").values).mean(-1))
    depths = data.depth.values
    growth = float(last[-1] / last[0]) ** (1 / max(1, int(depths[-1] - depths[0])))
    # A hundredth a layer is 2.6-fold over 96 layers.
    holds = len(depths) > 1 and growth > 1.01
    return Claim(
        "C5",
        "with Post-LN gradients grow exponentially with depth",
        "a common claim; Xiong et al. 2020, theorem 1, says that the last layer's does not depend on depth",
        "a factor a layer",
        f"x {growth:.4f} a layer: " + " / ".join(f"{value:.3g}" for value in last) + " in the last layer",
        judge(holds),
        "" if holds else "the norm after the last sum bounds the last layer's gradient at every depth",
    )


def _mean(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))
