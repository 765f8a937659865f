"""DeepNorm at great depth: its constants, variance and gradient, and how much the first step of training changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.lab.branches import Attention
from resstream.lab.experiments.parts.at_start import at_start, random_words, require_depths
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.first_update import Method, first_update, matrices_of, within_branches
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.slopes import check_slope
from resstream.lab.nets import Net, transformer
from resstream.lab.rules import DeepNormScales
from resstream.result import Result

RULES = ("post_ln", "deep_norm")
# Which first step is taken of which net: its rule, the weights that change, the method and its step size.
STEPS: Mapping[str, tuple[str, Callable[[Net], list[str]], Method, float]] = {
    "Post-LN, SGD on matrices": ("post_ln", matrices_of, "SGD", 0.1),
    "DeepNorm, SGD on matrices": ("deep_norm", matrices_of, "SGD", 0.1),
    "DeepNorm, SGD on all": ("deep_norm", within_branches, "SGD", 0.1),
    "DeepNorm, Adam on matrices": ("deep_norm", matrices_of, "Adam", 1e-4),
}
_SOURCE = "Wang et al. 2022, DeepNet: scaling Transformers to 1,000 layers"


def deepnorm_depth(
    *, depths: Sequence[int] = (10, 30, 100, 300, 1000), seeds: int = 3, progress: bool = False
) -> Result:
    """Build Post-LN and DeepNorm Transformers up to 1000 layers deep, and measure variance, gradient and first update.

    >>> from resstream import lab
    >>> deep = lab.experiments.deepnorm_depth(depths=[5, 20], seeds=1)
    >>> deep.data.in_out.sel(rule="deep_norm").values.round(1).ravel()
    array([1., 1.])

    The nets are 32 wide, with four heads that read all positions and 128 ReLU neurons; they read 4 prompts of 16 random
    words, with random labels.

    Args:
        depths: numbers of layers.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result over (rule, depth, seed): `variance` of the stream at the end, and `in_out`, the norm of the loss's
        gradient at the input over that at the end; and `moved` (first_step, depth, seed), the root mean square change
        of the logits in one step of training.
    Raises:
        LabError: no seeds, or no such net.
    Source:
        Wang et al. 2022, DeepNet: scaling Transformers to 1,000 layers, figure 2 and section 4.
    """
    chosen = require_depths(depths)
    shape = len(chosen), len(require_seeds(seeds))
    variance, in_out = np.empty((len(RULES), *shape)), np.empty((len(RULES), *shape))
    moved = np.empty((len(STEPS), *shape))
    with tqdm(total=shape[0] * seeds, desc="DeepNorm", disable=not progress) as bar:
        for place, seed in ((place, seed) for place in range(len(chosen)) for seed in range(seeds)):
            sample = random_words(4, 16, seed=seed)
            nets = {rule: _net(rule, chosen[place], seed) for rule in RULES}
            for number, net in enumerate(nets.values()):
                start = at_start(net, sample)
                variance[number, place, seed], in_out[number, place, seed] = start.variance[-1], start.in_over_out
            for number, (rule, names, method, rate) in enumerate(STEPS.values()):
                moved[number, place, seed] = first_update(nets[rule], sample, names(nets[rule]), method, rate)
            bar.update()
    dims = ("rule", "depth", "seed")
    data = xr.Dataset(
        {"moved": (("first_step", *dims[1:]), moved), "in_out": (dims, in_out), "variance": (dims, variance)},
        coords={"rule": list(RULES), "first_step": list(STEPS), "depth": chosen, "seed": np.arange(seeds)},
    )
    deepest = data.isel(depth=-1)
    sample = random_words(4, 16)
    return outcome(
        "deepnorm_depth",
        f"untrained Transformers of {chosen[0]} to {chosen[-1]} layers",
        data,
        views=[
            View("moved", "depth", "first_step", "layers", "change of the logits in one step", "xy"),
            View("in_out", "depth", "rule", "layers", "gradient at the input / at the end", "xy"),
        ],
        claims=[*_constants(), *_claims(data)],
        check=check_slope([net := _net(rule, chosen[0], 0) for rule in RULES], sample.task(net)),
        headline=(
            f"{chosen[-1]} layers: gradient at the input over that at the end "
            + ", ".join(f"{rule} {float(deepest.in_out.sel(rule=rule).mean()):.2g}" for rule in RULES)
            + "; one SGD step on the matrices moves the logits by "
            + ", ".join(
                f"{float(deepest.moved.sel(first_step=name).mean()):.2g} ({name.partition(',')[0]})"
                for name in list(STEPS)[:2]
            )
        ),
        settings={"seeds": seeds},
    )


def _net(rule: str, depth: int, seed: int) -> Net:
    return transformer(rule, layers=depth, width=32, attention=Attention(causal=False), seed=seed)


def _constants() -> list[Claim]:
    """The constants that the paper's table gives for two models."""
    single, encoder, decoder = DeepNormScales.single(100), DeepNormScales.encoder(12, 6), DeepNormScales.decoder(6)
    told = {
        "alpha and beta of 100 layers": ((single,), "3.7606, 0.1880"),
        "alpha and beta of an encoder of 12 layers and of its decoder of 6": (
            (encoder, decoder),
            "1.6862, 0.4179, 2.0598, 0.3433",
        ),
    }
    claims = []
    for says, (scales, expected) in told.items():
        found = ", ".join(f"{number:.4f}" for each in scales for number in (each.alpha, each.beta))
        claims.append(Claim("C7", says, f"{_SOURCE}, figure 2", expected, found, judge(found == expected)))
    return claims


def _claims(data: xr.Dataset) -> list[Claim]:
    depths = [int(each) for each in data.depth.values]
    ends = data.in_out.isel(depth=-1)
    deep, post = ends.sel(rule="deep_norm").values, ends.sel(rule="post_ln").values
    keeps = bool(abs(deep.mean() - 1) < 0.15)
    found = [
        Claim(
            "C7",
            f"DeepNorm passes the gradient through {depths[-1]} untrained layers as it is, and Post-LN does not",
            _SOURCE,
            "near 1; far below",
            f"{spelled(deep)}; {spelled(post, scale='log')}",
            judge(keeps and bool(post.mean() < 0.5)),
            "" if keeps and post.mean() < 0.5 else "so few layers are kind to either",
        )
    ]
    if len(depths) > 1:
        found += [_bounded(data, name, says, why) for name, (says, why) in _BOUNDED.items()]
    return found


_BOUNDED = {
    "DeepNorm, SGD on matrices": (
        "with DeepNorm one step of SGD on the matrices changes the output by as much at every depth",
        "the sum of beta^2 / alpha^2 over all matrices depends on depth here",
    ),
    "DeepNorm, SGD on all": (
        "the same, with the biases and the norms' own weights trained too",
        "their gradients carry no factor beta, so that their number multiplies the update; the theorem counts matrices",
    ),
    "DeepNorm, Adam on matrices": (
        "the same for Adam's first step on the matrices",
        "each weight moves by the step size however small its gradient is, and the changes add up over layers",
    ),
}


def _bounded(data: xr.Dataset, name: str, says: str, why: str) -> Claim:
    means = data.moved.sel(first_step=name).mean("seed").values
    depths = data.depth.values
    power = float(np.polyfit(np.log(depths), np.log(means), 1)[0])
    holds = abs(power) < 0.1
    return Claim(
        "C7",
        says,
        f"{_SOURCE}, section 4" if name.endswith("SGD on matrices") else "a common reading of it",
        "the same at every depth: a power of 0",
        f"{' / '.join(f'{mean:.3g}' for mean in means)} at {', '.join(map(str, depths))} layers: "
        f"a power of {power:.2f}",
        judge(holds),
        "" if holds else why,
    )
