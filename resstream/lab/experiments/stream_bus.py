"""The stream as a bus: how far apart the writes are that read one another directly, with skips and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from tqdm.auto import tqdm

from resstream.check import Check
from resstream.errors import LabError
from resstream.lab.branches import Layer
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.nets import mlp
from resstream.lab.tasks import spirals
from resstream.lab.training import train
from resstream.measure.direct_effects import direct_effects
from resstream.measure.metrics import logit_diff
from resstream.models import load
from resstream.models.trunk import ResidualModel
from resstream.result import Result

# Two names each, of which the second one in the clean prompt is the one that acts; who is given something is the other.
PAIRS = (
    ("When Mary and John went to the store, {} gave a drink to", "Mary", "John"),
    ("When Tom and James went to the park, {} gave a ball to", "Tom", "James"),
    ("When Dan and Sarah went to the lake, {} gave a kiss to", "Dan", "Sarah"),
    ("When Anna and Paul went to the school, {} gave a book to", "Anna", "Paul"),
)
LAB_DEPTH = 9
# A chain of layers has none; this is far above what rounding leaves of it.
SOME = 0.1
_SOURCE = "Elhage et al. 2021, A mathematical framework for Transformer circuits, on the residual stream as a channel"


def stream_bus(
    *,
    layers: str | Sequence[int] = "each",
    seeds: int = 3,
    model: ResidualModel | str = "smollm2",
    progress: bool = False,
) -> Result:
    """Measure how much each write moves the answer directly through each later one, and how many layers lie between.

    >>> from resstream import lab
    >>> bus = lab.experiments.stream_bus(layers=[0, 10, 20, 29], seeds=1)
    >>> bus.data.share.sel(net="plain", distance=[1, 2, 3]).values.ravel()
    array([1., 0., 0.])

    The trained model says who is given something, in prompts in which one of two names acts; the toy nets, stacks of
    nine layers with and without skips, tell the arms of a spiral apart.

    Args:
        layers: whose writes in the trained model are looked at: "each", or several.
        seeds: number of pairs of prompts, at most 4, and of toy nets of each kind.
        model: a trained model with a tokenizer, or what `rs.load` takes.
        progress: show a progress bar.
    Returns:
        Result with `share` (net, distance, seed), the share of all direct effects between writes that go so many layers
        up, NaN beyond a net's depth; `early` (net, seed), the share of what the last third of the layers read that the
        first third wrote; and `effect` (sender, receiver), the mean absolute direct effect in the trained model, in
        logits.
    Raises:
        LabError: no seeds, or more than there are pairs.
        SiteError: no such layer.
    Source:
        Elhage et al. 2021, A mathematical framework for Transformer circuits, "virtual weights and the residual stream
        as a communication channel".
    """
    opened, numbers = load(model), require_pairs(seeds)
    nets: dict[str, list[Matrix]] = {opened.name: [], "residual": [], "plain": []}
    for seed in tqdm(numbers, desc="stream bus", disable=not progress):
        nets[opened.name].append(_of_model(opened, PAIRS[seed], layers))
        for rule in ("residual", "plain"):
            nets[rule].append(_of_toy(rule, seed))
    trained, distances = nets[opened.name], np.arange(opened.n_layers)
    names = [str(name) for name in trained[0].effect.sender.values]
    shares = np.array([[share_by_distance(each, distances) for each in found] for found in nets.values()])
    data = xr.Dataset(
        {
            "share": (("net", "seed", "distance"), shares),
            "early": (("net", "seed"), [[share_from_early(each) for each in found] for found in nets.values()]),
            "effect": (("sender", "receiver"), np.mean([each.effect.values for each in trained], axis=0)),
        },
        coords={
            "net": list(nets),
            "distance": distances,
            "seed": np.arange(seeds),
            "sender": names,
            "receiver": names,
        },
    ).transpose("net", "distance", "sender", "receiver", "seed")
    far = data.share.where(data.distance > 1).sum("distance").mean("seed")
    return outcome(
        "stream_bus",
        f"{opened.name}, and toy nets of {LAB_DEPTH} layers",
        data,
        views=[
            View("share", "distance", "net", "layers up", "share of the direct effects"),
            View("early", "net", "", "net", "share of what late layers read that early ones wrote"),
        ],
        claims=_claims(data, opened.name),
        check=max((each.check for found in nets.values() for each in found), key=lambda check: check.error),
        headline="direct effects over more than one layer: "
        + ", ".join(f"{float(value):.0%} in {name}" for name, value in zip(nets, far, strict=True)),
        settings={"layers": layers if isinstance(layers, str) else list(layers), "seeds": seeds},
    )


def require_pairs(seeds: int) -> range:
    """The seeds, as many as there are pairs at most."""
    if require_seeds(seeds) and seeds > len(PAIRS):
        raise LabError(f"seeds={seeds}: there are {len(PAIRS)} pairs of prompts; give a number from 1 to {len(PAIRS)}")
    return range(seeds)


@dataclass(frozen=True)
class Matrix:
    """The size of the direct effect of each write on the metric, through each later write.

    Attributes:
        effect: over (sender, receiver), with the layer of each as a coordinate; zero where there is none.
        check: the identity that was measured along.
    """

    effect: xr.DataArray
    check: Check

    @classmethod
    def of(cls, result: Result) -> Matrix:
        """What a result of `direct_effects` says about writes that read writes."""
        found = result.data.effect.mean("prompt")
        writes = [name for name in map(str, found.sender.values) if name != "embed"]
        own = np.abs(found.sel(sender=writes, receiver=writes)).fillna(0)
        layers = [int(name.partition(".")[0]) for name in writes]
        return cls(own.assign_coords(above=("receiver", layers), below=("sender", layers)), result.check)


def share_by_distance(matrix: Matrix, distances: Int[np.ndarray, " distance"]) -> Float[np.ndarray, " distance"]:
    """The share of all direct effects that go so many layers up; NaN where no two writes are so far apart."""
    apart = (matrix.effect.above - matrix.effect.below).transpose("sender", "receiver").values
    sizes = matrix.effect.transpose("sender", "receiver").values
    shares = [sizes[apart == distance].sum() / sizes.sum() for distance in distances]
    return np.where(np.isin(distances, apart), shares, np.nan)


def share_from_early(matrix: Matrix) -> float:
    """The share of what the last third of the layers read of other writes that was written in the first third."""
    depth = int(matrix.effect.above.max()) + 1
    late = matrix.effect.sel(receiver=matrix.effect.above >= 2 * depth / 3)
    return float(late.sel(sender=matrix.effect.below < depth / 3).sum() / late.sum())


def _of_model(model: ResidualModel, pair: tuple[str, str, str], layers: str | Sequence[int]) -> Matrix:
    text, given, acting = pair
    clean, corrupted = text.format(acting), text.format(given)
    return Matrix.of(direct_effects(model, clean, corrupted, logit_diff(f" {given}", f" {acting}"), layers=layers))


def _of_toy(rule: str, seed: int) -> Matrix:
    """A toy net that tells spirals apart, on a point of the first arm against one of the second."""
    task = spirals(90, seed=seed)
    net = mlp(rule, depth=LAB_DEPTH, branch=Layer("tanh"), ends=task.ends, seed=seed)
    trained = train(net, task, steps=100, rate=3e-3).net
    first, second = (task.prompts[task.labels == arm][-1:] for arm in (0, 1))
    return Matrix.of(direct_effects(trained, first, second, lambda logits: logits[:, -1, 0] - logits[:, -1, 1]))


def _claims(data: xr.Dataset, model: str) -> list[Claim]:
    early = {str(net): data.early.sel(net=net).values for net in data.net.values}
    plain = float(data.share.sel(net="plain").where(data.distance > 1).sum("distance").max())
    reads, chained = bool(early[model].mean() > SOME), plain == 0
    return [
        Claim(
            "C4",
            f"late layers of {model} read directly what early layers wrote",
            _SOURCE,
            f"more than {SOME:.0%} of what the last third reads is from the first third",
            f"{spelled(100 * early[model])} %",
            judge(reads),
            "" if reads else "late layers read their neighbours on this task",
        ),
        Claim(
            "C4",
            "that takes skips: without them a layer reads the one below it and no other",
            _SOURCE,
            "0 over more than one layer without skips; early writes are read late with them",
            f"{plain:.0%}; {spelled(100 * early['residual'])} % of what the last third reads is from the first third",
            judge(chained and bool(early["residual"].mean() > SOME)),
            "" if chained and early["residual"].mean() > SOME else "something passes by the branches of the plain net",
        ),
    ]
