"""Every residual rule's gradient, weight by weight, against central differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from resstream.check import Check
from resstream.lab.branches import Attention, Perceptron
from resstream.lab.ends import Words
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds
from resstream.lab.nets import Net, mlp, transformer
from resstream.lab.require import whole
from resstream.lab.rules import RULES
from resstream.lab.rules.base import Weights
from resstream.models.trunk import worst_of
from resstream.result import Result

# Smooth activations: across the kink of a ReLU, a difference is no derivative.
KINDS: Mapping[str, Callable[[str, int], Net]] = {
    "MLP": lambda rule, seed: mlp(
        rule, depth=3, width=8, branch=Perceptron(std=(0.5, 0.5)), ends=Words(vocab=12), seed=seed
    ),
    "Transformer": lambda rule, seed: transformer(
        rule,
        layers=2,
        width=8,
        attention=Attention(heads=2),
        branch=Perceptron(16, "gelu"),
        ends=Words(vocab=12, positions=5),
        seed=seed,
    ),
}
STEP = 1e-5


def gradient_check(
    *, rules: Sequence[str] | None = None, entries: int = 3, seeds: int = 3, progress: bool = False
) -> Result:
    """Hold autograd against central differences in every weight tensor of nets of every rule.

    >>> from resstream import lab
    >>> r = lab.experiments.gradient_check(rules=["residual", "post_ln"], entries=1, seeds=1)
    >>> r.data.worst.dims, r.check.passed
    (('rule', 'net', 'seed'), True)

    Args:
        rules: names of rules; all of them by default.
        entries: how many entries are drawn from each tensor.
        seeds: number of nets of each rule and kind.
        progress: show a progress bar.
    Returns:
        Result over (rule, net, seed), where `net` is an MLP or a Transformer: `median` and `worst`, the relative error
        |a - d| / max(|a|, |d|) of a derivative a by autograd and d by a central difference, over the entries that were
        drawn, but for those on which the loss does not depend; `count`, how many these are; and `absolute`, the largest
        |a - d| as a share of the largest derivative among them.
    Raises:
        LabError: an unknown rule, no entries, or no seeds.
    """
    whole("entries", entries)
    names = list(RULES) if rules is None else list(rules)
    shape = (len(names), len(KINDS), len(require_seeds(seeds)))
    statistics = np.full((4, *shape), np.nan)
    with tqdm(total=int(np.prod(shape)), desc="gradient check", disable=not progress) as bar:
        for place in np.ndindex(shape):
            build = list(KINDS.values())[place[1]]
            statistics[(slice(None), *place)] = errors_of(build(names[place[0]], place[2]), entries, place[2])
            bar.update()
    dims = ("rule", "net", "seed")
    variables = zip(("median", "worst", "absolute", "count"), statistics, strict=True)
    data = xr.Dataset(
        {name: (dims, values) for name, values in variables},
        coords={"rule": names, "net": list(KINDS), "seed": np.arange(seeds)},
    )
    middle, worst = float(data["median"].median()), float(data.worst.max())
    off = {f"{rule} {net}": float(data.absolute.sel(rule=rule, net=net).max()) for rule in names for net in KINDS}
    return outcome(
        "gradient_check",
        f"nets of {len(names)} rules",
        data,
        views=[
            View("median", "rule", "net", "rule", "median relative error", "y"),
            View("worst", "rule", "net", "rule", "worst relative error", "y"),
        ],
        claims=[
            Claim(
                "A5",
                "gradients agree with central differences on every weight",
                "a common claim",
                "relative error: median 1e-9 to 1e-7, worst near 1e-5",
                f"median {middle:.1e}, worst {worst:.1e} of {int(data['count'].sum())} entries",
                judge(middle < 1e-7 and worst < 1e-4),
            )
        ],
        check=Check(
            "autograd = central differences, as a share of the largest derivative",
            max(off.values()),
            1e-6,
            where=worst_of(off),
        ),
        headline=f"relative error over {int(data['count'].sum())} weights: median {middle:.1e}, worst {worst:.1e}",
        settings={"entries": entries, "seeds": seeds, "step": STEP},
    )


def errors_of(net: Net, entries: int, seed: int) -> tuple[float, float, float, float]:
    """Median and worst relative error over entries of all weights, the worst as a share of the largest, and how many.

    Rules that draw in training draw the same numbers in every pass.

    >>> median, worst, _, count = errors_of(KINDS["MLP"]("residual", 0), entries=2, seed=0)
    >>> median < 1e-7, worst < 1e-4, count
    (True, True, 27.0)
    """
    weights = {name: value.detach().clone().requires_grad_() for name, value in net.weights.items()}
    slopes = torch.autograd.grad(_loss(net, weights), list(weights.values()), allow_unused=True)
    rng = np.random.default_rng(seed)
    found = []
    for (name, value), slope in zip(weights.items(), slopes, strict=True):
        for entry in rng.integers(value.numel(), size=entries):
            difference = _difference(net, weights, name, int(entry))
            found.append((0.0 if slope is None else float(slope.flatten()[entry]), difference))
    exact, differences = np.array(found).T
    apart, size = np.abs(exact - differences), np.maximum(np.abs(exact), np.abs(differences))
    # A weight that the loss does not depend on, such as one behind a factor of zero, has two zeros and no error.
    relative = apart[size > 0] / size[size > 0]
    return float(np.median(relative)), float(relative.max()), float(apart.max() / size.max()), float(len(relative))


def _difference(net: Net, weights: Weights, name: str, entry: int) -> float:
    with torch.no_grad():
        ends = []
        for step in (STEP, -STEP):
            moved = weights[name].detach().clone()
            moved.view(-1)[entry] += step
            ends.append(float(_loss(net, {**weights, name: moved})))
    return (ends[0] - ends[1]) / (2 * STEP)


def _loss(net: Net, weights: Weights) -> Tensor:
    """The next-token loss of a few random tokens, as in training."""
    rng = torch.Generator().manual_seed(0)
    tokens = net.tokenize(torch.randint(net.vocab_size, (4, 5), generator=rng))
    changed = net.with_weights(weights)
    logits = changed.readout(changed.forward(tokens, torch.Generator().manual_seed(1)))
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens.ids[:, 1:].flatten())
