"""Deep stacks from the first step: rules that start as the identity against Post-LN, with warm-up and without."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xarray as xr

from resstream.check import Check
from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, spelled
from resstream.lab.experiments.parts.races import race
from resstream.lab.nets import Net, mlp
from resstream.lab.rules import Fixup, LayerScale, PostLN, ReZero, Rule, SkipInit
from resstream.lab.tasks import Task, spirals
from resstream.lab.training import Training, train
from resstream.models.trunk import relative_distance
from resstream.result import Result

# The rule, and the share of all steps over which the step size rises.
KINDS: Mapping[str, tuple[Rule, float]] = {
    "Post-LN": (PostLN(), 0.0),
    "Post-LN, warm-up": (PostLN(), 0.4),
    "ReZero": (ReZero(), 0.0),
    "SkipInit": (SkipInit("depth"), 0.0),
    "Fixup": (Fixup(), 0.0),
    "LayerScale": (LayerScale(), 0.0),
}
IDENTITY = ("ReZero", "Fixup")
# The row of the claim about each rule, and the paper that makes it.
CLAIMS = {
    "ReZero": ("D2", "Bachlechner et al. 2021, ReZero is all you need, section 4"),
    "SkipInit": ("D3", "De and Smith 2020, Batch normalization biases residual blocks, section 4"),
    "Fixup": ("D4", "Zhang, Dauphin and Ma 2019, Fixup initialization, section 4"),
    "LayerScale": ("D5", "Touvron et al. 2021, Going deeper with image Transformers, section 2"),
}


def zero_init_training(*, depth: int = 48, steps: int = 150, seeds: int = 3, progress: bool = False) -> Result:
    """Train deep stacks whose branches start at or near zero beside Post-LN ones, at full rate from the first step.

    >>> from resstream import lab
    >>> r = lab.experiments.zero_init_training(depth=6, steps=5, seeds=1)
    >>> r.data.accuracy.dims, r.data.rule.values[:3].tolist(), r.check.passed
    (('rule', 'step', 'seed'), ['Post-LN', 'Post-LN, warm-up', 'ReZero'], True)

    Args:
        depth: number of blocks, of two weight layers each.
        steps: number of steps of training on three spirals, of Adam at rate 0.003.
        seeds: number of nets of each rule.
        progress: show a progress bar.
    Returns:
        Result over (rule, step, seed): `accuracy`, and `loss` in nats. Over (rule, seed): `final`, the accuracy where
        training ended, `final_loss`, and `first_full`, `onset` and `diverged` as in `skip_training`.
    Raises:
        LabError: no seeds, or no such net or training.
    Source:
        Bachlechner et al. 2021, ReZero is all you need: fast convergence at large depth, section 4; Xiong et al. 2020,
        On layer normalization in the Transformer architecture, section 3, for Post-LN and warm-up.
    """

    def run(kind: str, seed: int) -> Training:
        warmup = int(KINDS[kind][1] * steps)
        return train(*_net(kind, depth, seed), steps=steps, warmup=warmup)

    data = race("rule", list(KINDS), run, steps=steps, seeds=seeds, progress=progress)
    means = data.final.mean("seed")
    return outcome(
        "zero_init_training",
        f"{depth} blocks on three spirals",
        data,
        views=[
            View("accuracy", "step", "rule", "step", "accuracy", share=True),
            View("loss", "step", "rule", "step", "loss (nats)", "y"),
            View("final", "rule", "", "", "accuracy after training", share=True),
        ],
        claims=_claims(data),
        check=_check(depth),
        headline=f"accuracy after {steps} steps: "
        + ", ".join(f"{kind} {float(means.sel(rule=kind)):.2f}" for kind in KINDS),
        settings={"depth": depth, "seeds": seeds, "steps": steps},
    )


def _net(kind: str, depth: int, seed: int) -> tuple[Net, Task]:
    task = spirals(150)
    branch = Perceptron(64, "relu", (1.0, 2**0.5))
    return mlp(KINDS[kind][0], depth=depth, branch=branch, ends=task.ends, seed=seed), task


def _check(depth: int) -> Check:
    """Hold the last state against the first, in untrained stacks whose rule makes them the identity."""
    errors = []
    for kind in IDENTITY:
        net, task = _net(kind, depth, 0)
        trunk = net.trunk(net.tokenize(task.prompts))
        with torch.no_grad():
            errors.append(relative_distance(trunk.run(), trunk.x0))
    return Check(f"{' and '.join(IDENTITY)} start as the identity", max(errors), 1e-12)


def _claims(data: xr.Dataset) -> list[Claim]:
    final = {kind: data.final.sel(rule=kind).values for kind in KINDS}
    cold, warm = final["Post-LN"], final["Post-LN, warm-up"]
    told = {kind: spelled(values, scale="share") for kind, values in final.items()}
    stuck = cold.mean() < 0.6
    claims = [
        Claim(
            row,
            f"{kind} trains a deep stack at full rate from the first step, where Post-LN without warm-up does not",
            source,
            "trains; Post-LN does not",
            f"accuracy {told[kind]}; Post-LN {told['Post-LN']}",
            judge(bool(stuck and final[kind].mean() > 0.95)),
        )
        for kind, (row, source) in CLAIMS.items()
    ]
    best = data.accuracy.sel(rule="Post-LN, warm-up").max("step").values
    return [
        *claims,
        Claim(
            "D2",
            "warm-up is all that a deep Post-LN stack lacks",
            "a common claim, after Xiong et al. 2020, On layer normalization, section 3.2",
            "it trains with warm-up",
            f"accuracy {told['Post-LN, warm-up']} at the end, {spelled(best, scale='share')} at best on the way; "
            f"without warm-up {told['Post-LN']}",
            judge(bool(stuck and warm.mean() > 0.95)),
            "it learns something while the rate rises, and loses it at the full rate, which the other rules bear",
        ),
    ]
