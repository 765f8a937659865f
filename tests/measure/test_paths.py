"""Path lengths against every single path: products of explicit Jacobians, and closed forms where there are any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import comb

import numpy as np
import pytest
import torch
from models.test_trunk import plant
from stream.test_read import ARCHITECTURES, Planted, says, unchecked
from tiny import LAYERS, blocks_of, some_ids, state_of, tokenizer

import resstream as rs
from resstream.check import Check
from resstream.errors import MetricError, SiteError, UnsupportedModelError
from resstream.measure.path_sums.path_counts import count_paths, effective_range, share_of_paths
from resstream.models.carry import UNCHANGED, Carry
from resstream.models.causal_lm import CausalTrunk
from resstream.models.trunk import ResidualModel, Trunk
from resstream.sites import Site
from resstream.stream import expand

EXACT = 1e-10  # float64, relative
POSITIONS, WIDTH, VOCAB = 3, 4, 6
IDS = some_ids(1, POSITIONS) % VOCAB
METRIC = rs.logit_diff(0, 1)
IOI = "When Mary and John went to the store, John gave a drink to"
Part = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ToyTrunk(Trunk):
    """A stream of a few numbers, and branches that are plain functions."""

    model: ToyModel
    tokens: object

    @property
    def x0(self):
        return self.model.embedding[self.tokens.ids]

    @property
    def order(self):
        return range(self.model.n_layers)

    def layer(self, layer, x):
        return through(self.model, self.model.branches[layer], x, self.model.maps[layer])

    def write(self, site, x):
        return self.model.branches[site.layer][site.kind == "mlp"](x)


def same(x):
    """What a plain trunk does to the stream: nothing."""
    return x


# For each branch of a layer, what the trunk does to the stream before and after that branch is added.
Maps = tuple[tuple[Part, Part], tuple[Part, Part]]
PLAIN: Maps = ((same, same), (same, same))


def through(model, pair, x, maps: Maps = PLAIN):
    """The stream after a layer, by hand; branches that are added together have the first one's maps."""
    attn, mlp = pair
    (before, after), (before_mlp, after_mlp) = maps
    if model.layout == "parallel":
        return after(before(x) + attn(x) + mlp(x))
    x = after(before(x) + attn(x))
    return after_mlp(before_mlp(x) + mlp(x))


class ToyModel(ResidualModel):
    """A residual network in float64 whose two branches in each layer are given, and what its trunk does besides."""

    dtype, device = torch.float64, torch.device("cpu")
    name, tokenizer, hf_model = "toy", None, None
    d_model, n_heads, vocab_size, max_positions = WIDTH, 1, VOCAB, None
    check = Check("given", 0.0, 0.0)

    def __init__(
        self,
        branches: Sequence[tuple[Part, Part]],
        layout: str = "sequential",
        seed: int = 0,
        maps: Sequence[Maps] | None = None,
    ):
        rng = torch.Generator().manual_seed(seed)
        self.branches, self.layout, self.n_layers = branches, layout, len(branches)
        self.maps = [PLAIN] * len(branches) if maps is None else maps
        self.embedding = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=rng)
        self.head = torch.randn(WIDTH, VOCAB, dtype=torch.float64, generator=rng)

    def trunk(self, tokens):
        return ToyTrunk(self, tokens)

    def readout(self, x, vocab=None):
        logits = torch.nn.functional.softsign(x) @ self.head
        return logits if vocab is None else logits[..., list(vocab)]

    def own_logits(self, tokens):
        return self.readout(self.trunk(tokens).run())

    def carry(self, step):
        maps = self.maps[step[0].layer][step[0].kind == "mlp"]
        return Carry(*(None if part is same else part for part in maps))

    def verify(self):
        return self.check

    def in_float64(self):
        return self


def scaled(factor: float) -> Part:
    return lambda x: factor * x


def branch(kind: str, mixes: bool, seed: int) -> Part:
    """A random branch, linear or not; one that mixes lets a position read those before it, as attention does."""
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=rng) / WIDTH**0.5
    mixing = torch.randn(POSITIONS, POSITIONS, dtype=torch.float64, generator=rng).tril()

    def write(x):
        mixed = mixing @ x if mixes else x
        return torch.tanh(mixed @ weights) if kind == "tanh" else 0.5 * mixed @ weights

    return write


def random_parts(layers: int, kind: str, seed: int = 0) -> list[tuple[Part, Part]]:
    return [
        (branch(kind, True, 1000 * seed + 2 * n), branch(kind, False, 1000 * seed + 2 * n + 1)) for n in range(layers)
    ]


def post_norm(seed: int) -> Part:
    """A layer norm with scales and shifts of its own."""
    rng = torch.Generator().manual_seed(seed)
    scale, shift = torch.randn(2, WIDTH, dtype=torch.float64, generator=rng)
    return lambda x: torch.nn.functional.layer_norm(x, (WIDTH,), 1 + 0.3 * scale, 0.3 * shift)


def gate(seed: int) -> Part:
    """The share of the stream that a highway lets pass, which depends on the stream."""
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=rng) / WIDTH**0.5
    return lambda x: torch.sigmoid(1 + x @ weights) * x


# Trunks that do something to the stream itself.
CARRYING = {
    "scaled skip": lambda: ToyModel(
        random_parts(4, "tanh", seed=5), seed=5, maps=[((scaled(0.8), same), (scaled(-1.1), same))] * 4
    ),
    "norm on the trunk": lambda: ToyModel(
        random_parts(4, "tanh", seed=6),
        seed=6,
        maps=[((same, post_norm(2 * n)), (same, post_norm(2 * n + 1))) for n in range(4)],
    ),
    "tanh on the trunk": lambda: ToyModel(
        random_parts(4, "tanh", seed=7),
        seed=7,
        maps=[((torch.tanh, same), PLAIN[1]), (PLAIN[0], (same, torch.tanh)), PLAIN, ((torch.tanh, torch.tanh),) * 2],
    ),
    "parallel norm on the trunk": lambda: ToyModel(
        random_parts(4, "tanh", seed=8),
        layout="parallel",
        seed=8,
        maps=[((scaled(0.7), post_norm(0)), PLAIN[1]), PLAIN, ((same, post_norm(1)), PLAIN[1]), PLAIN],
    ),
    "parallel highway": lambda: ToyModel(
        random_parts(3, "tanh", seed=9),
        layout="parallel",
        seed=9,
        maps=[((gate(0), same), PLAIN[1]), ((gate(1), torch.tanh), PLAIN[1]), ((torch.tanh, same), PLAIN[1])],
    ),
}

TOYS = {
    "linear": lambda: ToyModel(random_parts(3, "linear")),
    "tanh": lambda: ToyModel(random_parts(5, "tanh")),
    "other tanh": lambda: ToyModel(random_parts(4, "tanh", seed=1), seed=1),
    "parallel": lambda: ToyModel(random_parts(4, "tanh", seed=2), layout="parallel"),
    "linear parallel": lambda: ToyModel(random_parts(2, "linear", seed=3), layout="parallel"),
    **CARRYING,
}
FEW = ["tanh", "parallel", "norm on the trunk", "parallel highway"]


@dataclass(frozen=True)
class Paths:
    """Every path through a network: which hop it takes at each step, and the gradient that it carries to the start."""

    hops: np.ndarray
    vectors: torch.Tensor
    gradient: torch.Tensor

    @property
    def lengths(self):
        """How many hops each path takes; -1 stands for none."""
        return (self.hops >= 0).sum(1)

    def at(self, position):
        """The same paths, looked at in some positions only."""
        position = [position] if isinstance(position, int) else position
        wanted = [
            vector.unflatten(-1, (POSITIONS, WIDTH))[..., position, :].flatten(-2)
            for vector in (self.vectors, self.gradient)
        ]
        return Paths(self.hops, *wanted)

    def by_length(self, of):
        """A statistic of the paths of each length."""
        return np.array([of(self.vectors[torch.from_numpy(self.lengths == n)]) for n in range(self.lengths.max() + 1)])

    @property
    def norm(self):
        return self.by_length(lambda some: float(some.sum(0).norm()))

    @property
    def share(self):
        return self.by_length(lambda some: float(some.sum(0) @ self.gradient / self.gradient.norm() ** 2))

    @property
    def path_norm(self):
        return self.by_length(lambda some: float(some.norm(dim=1).mean()))

    @property
    def rms(self):
        return self.by_length(lambda some: float(some.square().sum().sqrt()))

    @property
    def kappa(self):
        return float(self.norm.sum() / self.gradient.norm())


@dataclass(frozen=True)
class Sum:
    """A step of a trunk: branches that read one state, and what is done to that before and after their sum."""

    parts: Sequence[Part]
    before: Part = same
    after: Part = same

    def total(self, x):
        return self.before(x) + sum(part(x) for part in self.parts)

    def __call__(self, x):
        return self.after(self.total(x))

    def factors(self, x):
        """The explicit factor of a path that passes by, and of a path through each branch."""
        outer = jacobian(self.after, self.total(x))
        return outer @ jacobian(self.before, x), [outer @ jacobian(part, x) for part in self.parts]


def jacobian(part: Part, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(part, x).reshape(x.numel(), x.numel())


def enumerate_paths(steps: Sequence[Sum | list[Sum]], x: torch.Tensor, metric: Part) -> Paths:
    """Multiply out every path, with explicit factors; a list of sums is one step, hopped where any branch in it is."""
    factors, start, end = [], x.detach().requires_grad_(), x
    for step in steps:
        inside = []
        for some in [step] if isinstance(step, Sum) else step:
            inside.append(some.factors(end))
            end = some(end)
        factors += inside if isinstance(step, Sum) else [together(inside)]
    leaf = end.detach().requires_grad_()
    (top,) = torch.autograd.grad(metric(leaf), leaf)
    taken, vectors = list(product(*(range(-1, len(hops)) for _, hops in factors))), []
    for path in taken:
        vector = top.flatten()
        for hop, (passing, hops) in zip(reversed(path), reversed(factors), strict=True):
            vector = (passing if hop < 0 else hops[hop]).T @ vector
        vectors.append(vector)
    whole = start
    for some in (some for step in steps for some in ([step] if isinstance(step, Sum) else step)):
        whole = some(whole)
    (gradient,) = torch.autograd.grad(metric(whole), start)
    return Paths(np.array(taken), torch.stack(vectors), gradient.flatten())


def together(inside):
    """Several steps as one: the path that passes by all of them, and the sum of those that take at least one hop."""
    passing, hopping = torch.eye(len(inside[0][0]), dtype=torch.float64), 0.0
    for past, hops in inside:
        hopping = (past + sum(hops)) @ hopping + sum(hops) @ passing if torch.is_tensor(hopping) else sum(hops)
        passing = past @ passing
    return passing, [hopping]


def steps_of(model: ToyModel, unit: str, start: int) -> list[Sum | list[Sum]]:
    """The steps of a toy, by hand."""
    layers = []
    for (attn, mlp), maps in zip(model.branches[start:], model.maps[start:], strict=True):
        both = [Sum((attn,), *maps[0]), Sum((mlp,), *maps[1])]
        layers.append([Sum((attn, mlp), *maps[0])] if model.layout == "parallel" else both)
    return layers if unit == "layer" else [some for layer in layers for some in layer]


def toy_paths(model: ToyModel, unit: str = "write", start: int = 0) -> Paths:
    x = model.embedding[IDS]
    for step in steps_of(model, "layer", 0)[:start]:
        for some in step:
            x = some(x)

    def metric(x):
        logits = (torch.nn.functional.softsign(x) @ model.head)[0, -1]
        return logits[0] - logits[1]

    return enumerate_paths(steps_of(model, unit, start), x, metric)


def the_expansion_is_every_path(model, unit, start):
    every = toy_paths(model, unit, start)
    result = rs.path_lengths(model, IDS, METRIC, unit=unit, start=start, samples=1000)
    data = result.data.isel(prompt=0)
    counts = np.bincount(every.lengths)
    scale = float(every.gradient.norm())
    assert data["count"].values.tolist() == counts.tolist()
    assert np.abs(data.norm.values - every.norm).max() < EXACT * every.norm.max()
    assert np.abs(data.share.values - every.share).max() < EXACT * np.abs(every.share).max()
    assert float(data.share.sum()) == pytest.approx(1, abs=EXACT * every.kappa)
    assert float(data.gradient_norm) == pytest.approx(scale, rel=EXACT)
    assert float(data.kappa) == pytest.approx(every.kappa, rel=EXACT)
    assert float(data.completeness) < EXACT
    assert float((every.vectors.sum(0) - every.gradient).norm()) < EXACT * scale, "and all paths are the gradient"
    # All paths were taken, so their mean is exact and its interval is a point.
    assert np.abs(data.path_norm.values / every.path_norm - 1).max() < EXACT
    assert (data.path_norm_low == data.path_norm).all()
    assert (data.path_norm_high == data.path_norm).all()
    weights = counts * every.path_norm
    assert np.abs(data.veit.values - weights / weights.sum()).max() < EXACT
    low, high = shortest(weights)
    assert (int(data.effective_low), int(data.effective_high)) == (low, high)
    assert float(data.effective_share) == pytest.approx(counts[low : high + 1].sum() / counts.sum(), rel=EXACT)
    assert result.check.passed
    assert result.check.error == float(data.completeness)


def shortest(weights):
    """The shortest range of lengths with 95 % of the weight, of all there are; the heavier one if two are as short."""
    ranges = [(low, high) for low in range(len(weights)) for high in range(low, len(weights))]
    enough = [each for each in ranges if weights[each[0] : each[1] + 1].sum() >= 0.95 * weights.sum() * (1 - 1e-12)]
    return min(enough, key=lambda each: (each[1] - each[0], -weights[each[0] : each[1] + 1].sum()))


@pytest.mark.parametrize("unit", ["write", "layer"])
@pytest.mark.parametrize("case", TOYS)
def test_the_expansion_is_every_path(case, unit):
    model = TOYS[case]()
    for start in {0, 1, model.n_layers - 1}:
        the_expansion_is_every_path(model, unit, start)


@pytest.mark.parametrize("unit", ["write", "layer"])
@pytest.mark.parametrize("case", FEW)
def test_every_layers_spectrum_comes_on_the_way_down(case, unit):
    model = TOYS[case]()
    data = rs.path_lengths(model, IDS, METRIC, unit=unit, start=1, samples=0, signs=0).data.isel(prompt=0)
    assert data.layer.values.tolist() == list(range(1, model.n_layers))
    for layer in data.layer.values:
        every, here = toy_paths(model, unit, int(layer)), data.sel(layer=layer)
        reached = len(every.norm)
        assert np.abs(here.norm_from.values[:reached] - every.norm).max() < EXACT * every.norm.max()
        assert np.abs(here.share_from.values[:reached] - every.share).max() < EXACT * np.abs(every.share).max()
        assert not here.norm_from.values[reached:].any()
        assert float(here.kappa_from) == pytest.approx(every.kappa, rel=EXACT)


@pytest.mark.parametrize("case", FEW)
def test_hops_through_attention_and_through_mlps(case):
    """The share of every path, added up by how many hops of either kind it takes."""
    model, every = TOYS[case](), toy_paths(TOYS[case]())
    first = np.arange(every.hops.shape[1]) % 2 == 0
    attn = every.hops == 0 if model.layout == "parallel" else (every.hops == 0) & first
    counts = attn.sum(1), every.lengths - attn.sum(1)
    data = rs.path_lengths(model, IDS, METRIC, by_branch=True, samples=0, signs=0).data.isel(prompt=0)
    assert data.branch_norm.shape == (model.n_layers + 1,) * 2
    for a, m in np.ndindex(data.branch_norm.shape):
        total = every.vectors[torch.from_numpy((counts[0] == a) & (counts[1] == m))].sum(0)
        share = float(total @ every.gradient / every.gradient.norm() ** 2)
        assert float(data.branch_norm[a, m]) == pytest.approx(float(total.norm()), abs=EXACT * every.norm.max())
        assert float(data.branch_share[a, m]) == pytest.approx(share, abs=EXACT * np.abs(every.share).max())


@pytest.mark.parametrize("positions", [-1, [0, 2], slice(1, None)])
def test_a_gradient_at_some_positions(positions):
    model, every = TOYS["tanh"](), toy_paths(TOYS["tanh"]()).at(positions)
    data = rs.path_lengths(model, IDS, METRIC, positions=positions, samples=1000).data.isel(prompt=0)
    assert np.abs(data.norm.values - every.norm).max() < EXACT * every.norm.max()
    assert np.abs(data.share.values - every.share).max() < EXACT * np.abs(every.share).max()
    assert np.abs(data.path_norm.values / every.path_norm - 1).max() < EXACT
    assert float(data.gradient_norm) == pytest.approx(float(every.gradient.norm()), rel=EXACT)
    assert float(data.completeness) < EXACT


@pytest.mark.parametrize("unit", ["write", "layer"])
@pytest.mark.parametrize("case", FEW)
def test_an_expansion_that_is_off_is_noticed(case, unit, monkeypatch):
    """The twin of the test above: every Jacobian is off by 0.1 %."""
    plant(monkeypatch, expand, "pull")
    with pytest.raises(AssertionError):
        the_expansion_is_every_path(TOYS[case](), unit, 0)


@pytest.mark.parametrize("kind", ["attn", "mlp"])
@pytest.mark.parametrize("case", FEW)
def test_the_check_notices_a_planted_error(kind, case, monkeypatch):
    """A write that is off by 0.1 % no longer adds up to what its layer does."""
    plant(monkeypatch, ToyTrunk, "write", kind)
    result = rs.path_lengths(TOYS[case](), IDS, METRIC, samples=0, signs=0)
    assert not result.check.passed
    assert result.check.error > 1e-5
    assert "FAILED" in repr(result)


@pytest.mark.parametrize("unit", ["write", "layer"])
@pytest.mark.parametrize("case", CARRYING)
def test_a_trunk_factor_that_is_forgotten_is_noticed(case, unit, monkeypatch):
    """At one step only, while the model itself still has it."""
    honest = ToyModel.carry
    monkeypatch.setattr(
        ToyModel, "carry", lambda self, step: UNCHANGED if str(step[0]) == "0.attn" else honest(self, step)
    )
    if unit == "write":
        assert not rs.path_lengths(TOYS[case](), IDS, METRIC, samples=0, signs=0).check.passed
    with pytest.raises(AssertionError):
        the_expansion_is_every_path(TOYS[case](), unit, 0)


@pytest.mark.parametrize("what", ["descend", "by_branch", "of_paths"])
@pytest.mark.parametrize("case", ["scaled skip", "parallel norm on the trunk"])
def test_a_program_that_forgets_a_trunk_factor_is_noticed(case, what):
    """The exact sums, the split by branch, and single paths, each alone."""
    model, every = TOYS[case](), toy_paths(TOYS[case]())
    whole = one_expansion(model)
    steps = [*whole.steps]
    assert steps[2].carry is not None
    steps[2] = replace(steps[2], carry=None)
    for expansion, right in ((whole, True), (replace(whole, steps=steps), False)):
        if what == "descend":
            *_, (_, probes) = expansion.descend()
            found = probes[0].flatten(1)
            expected = torch.stack([every.vectors[every.lengths == n].sum(0) for n in range(len(found))])
        elif what == "by_branch":
            found, expected = expansion.by_branch().sum((0, 1)).flatten(), every.gradient
        else:
            found = torch.cat(list(expansion.of_paths(every.hops))).flatten(1)
            expected = every.vectors
        assert bool((found - expected).abs().max() < EXACT * expected.abs().max()) == right


def test_what_the_trunk_does_is_said_once():
    result = rs.path_lengths(TOYS["parallel norm on the trunk"](), IDS, METRIC, samples=4)
    said = "trunk factors carried at 2 of 4 steps"
    assert result.settings["trunk"] == said
    assert repr(result).count(said) == 1
    assert result.plot().figure.get_suptitle().count(said) == 1
    plain = rs.path_lengths(TOYS["parallel"](), IDS, METRIC, samples=4)
    assert "trunk" not in plain.settings
    assert "trunk" not in repr(plain) + plain.plot().figure.get_suptitle()


@pytest.mark.parametrize("case", CARRYING)
def test_a_carrying_trunk_is_read_as_it_runs(case):
    """Its branches read what the trunk leaves them, and its writes are not held to add up to the next state."""
    model = TOYS[case]()
    stream = rs.read(model, IDS, sites=["resid_pre", "attn", "mlp", "resid_post"])
    assert stream.check.error < 1e-15
    assert not all(model.adds_up(layer) for layer in model.layers)
    x = model.embedding[IDS]
    for layer, ((attn, mlp), maps) in enumerate(zip(model.branches, model.maps, strict=True)):
        assert torch.equal(stream[Site(layer, "attn")], attn(x))
        mid = x if model.layout == "parallel" else maps[0][1](maps[0][0](x) + attn(x))
        assert torch.equal(stream[Site(layer, "mlp")], mlp(mid))
        x = through(model, (attn, mlp), x, maps)


# Closed forms


@pytest.mark.parametrize("factor", [0.3, 1.0, -0.4])
def test_equal_scalar_jacobians_give_the_binomial(factor):
    """c_k = C(n, k) j^k g; where j is positive, the shares are those of Bin(n, j / (1 + j))."""
    n = 10
    model = ToyModel([(scaled(factor), scaled(factor))] * (n // 2))
    data = rs.path_lengths(model, IDS, METRIC, samples=20).data.isel(prompt=0)
    terms = np.array([comb(n, k) * factor**k for k in range(n + 1)])
    top = float(data.gradient_norm) / (1 + factor) ** n
    assert np.abs(data.norm.values / (top * np.abs(terms)) - 1).max() < EXACT
    assert np.abs(data.share.values - terms / (1 + factor) ** n).max() < EXACT * np.abs(terms).sum() / (1 + factor) ** n
    assert float(data.kappa) == pytest.approx((1 + abs(factor)) ** n / (1 + factor) ** n, rel=EXACT)
    # Each path of a length carries the same, so any sample gives the mean, and its interval has no width.
    assert np.abs(data.path_norm.values / (top * np.abs(factor) ** np.arange(n + 1)) - 1).max() < EXACT
    assert np.abs(data.path_norm_high.values / data.path_norm_low.values - 1).max() < EXACT
    if factor > 0:
        p = factor / (1 + factor)
        binomial = [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        assert np.abs(data.share.values - binomial).max() < EXACT
        assert np.abs(data.veit.values - binomial).max() < EXACT


def test_equal_scalar_jacobians_in_parallel():
    """Each of n steps has two hops, so c_k = C(n, k) (2 j)^k g."""
    model = ToyModel([(scaled(0.3), scaled(0.3))] * 6, layout="parallel")
    data = rs.path_lengths(model, IDS, METRIC, samples=0, signs=0).data.isel(prompt=0)
    terms = np.array([comb(6, k) * 0.6**k for k in range(7)])
    assert np.abs(data.share.values - terms / terms.sum()).max() < EXACT
    assert data["count"].values.tolist() == [comb(6, k) * 2**k for k in range(7)]


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
@pytest.mark.parametrize("skip", [0.8, 1.1, -0.5])
def test_equal_scalar_jacobians_and_a_scaled_skip(skip, layout):
    """c_k = C(n, k) j^k lambda^(n - k) g, with two hops of j at each step in parallel; each sum is then scaled, too."""
    j, after, layers = 0.3, 1.25, 5
    maps = [((scaled(skip), scaled(after)),) * 2] * layers
    model = ToyModel([(scaled(j), scaled(j))] * layers, layout=layout, maps=maps)
    data = rs.path_lengths(model, IDS, METRIC, samples=20, signs=2).data.isel(prompt=0)
    n, hops = (layers, 2) if layout == "parallel" else (2 * layers, 1)
    each = after**n * np.array([j**k * skip ** (n - k) for k in range(n + 1)])
    counts = np.array([comb(n, k) * hops**k for k in range(n + 1)])
    whole = (after * (hops * j + skip)) ** n
    top = float(data.gradient_norm) / abs(whole)
    close = EXACT * np.abs(counts * each).sum() / abs(whole)
    assert np.abs(data.norm.values / (top * np.abs(counts * each)) - 1).max() < EXACT
    assert np.abs(data.share.values - counts * each / whole).max() < close
    assert np.abs(data.path_norm.values / (top * np.abs(each)) - 1).max() < EXACT
    assert data["count"].values.tolist() == counts.tolist()
    # The twin: without the factors of the trunk, the terms are others.
    assert not np.abs(data.share.values - counts * j ** np.arange(n + 1) / (1 + hops * j) ** n).max() < close


def test_branches_that_write_nothing():
    """Only the path that passes by everything carries anything; nothing is divided by zero on the way."""
    model = ToyModel([(scaled(0.0), scaled(0.0))] * 5)
    data = rs.path_lengths(model, IDS, METRIC, samples=8).data.isel(prompt=0)
    assert data.share.values.tolist() == pytest.approx([1.0, *[0.0] * 10], abs=EXACT)
    assert data.path_norm.values[1:].tolist() == [0.0] * 10
    assert data.veit.values.tolist() == pytest.approx([1.0, *[0.0] * 10], abs=EXACT)
    assert data.path_norm_high.values[1:].tolist() == [0.0] * 10
    assert (int(data.effective_low), int(data.effective_high)) == (0, 0)


# Sampling


SEEDS = range(20)


@pytest.fixture(scope="module")
def sampled():
    """A network of 12 writes: what its paths carry on average, and twenty samples of 400 paths a length."""
    model = ToyModel(random_parts(6, "tanh", seed=4))
    data = [rs.path_lengths(model, IDS, METRIC, samples=400, seed=seed).data.isel(prompt=0) for seed in SEEDS]
    return toy_paths(model).path_norm, data


def covered(exact, data):
    """In how many samples the interval of each length holds the exact mean."""
    return np.sum(
        [(each.path_norm_low.values <= exact) & (exact <= each.path_norm_high.values) for each in data], axis=0
    )


def test_intervals_hold_the_exact_mean(sampled):
    exact, data = sampled
    few = np.array([comb(12, k) for k in range(13)]) <= 400
    assert few.sum() == 8
    for each in data:
        assert np.abs(each.path_norm.values / exact - 1)[few].max() < EXACT
        assert (each.path_norm_low < each.path_norm).values[~few].all()
    hits = covered(exact, data)[~few]
    assert np.median(hits) >= 19, hits
    assert hits.min() >= 18, hits
    # The samples are unbiased, too: their mean lies nearer to the truth than any one of them needs to.
    means = np.stack([each.path_norm.values for each in data])
    error = means.std(axis=0, ddof=1)[~few] / len(SEEDS) ** 0.5
    assert (np.abs(means.mean(axis=0) - exact)[~few] < 3.5 * error).all()


def test_intervals_do_not_hold_another_mean(sampled):
    """The twin of the test above: a mean that is off by a half is mostly outside."""
    exact, data = sampled
    few = np.array([comb(12, k) for k in range(13)]) <= 400
    assert covered(1.5 * exact, data)[~few].max() <= 10


def test_rms_is_the_root_of_the_sum_of_squares():
    """Of all single paths of a length, from random signs; what no sign can change is exact."""
    model = ToyModel(random_parts(6, "tanh", seed=4))
    exact = toy_paths(model).rms
    data = [rs.path_lengths(model, IDS, METRIC, samples=0, signs=32, seed=seed).data.isel(prompt=0) for seed in SEEDS]
    for each in data:
        assert each.rms.values[[0, -1]].tolist() == pytest.approx(exact[[0, -1]].tolist(), rel=EXACT)
        assert (each.rms_low.values[1:-1] < each.rms.values[1:-1]).all()
    held = [(each.rms_low.values <= exact) & (exact <= each.rms_high.values) for each in data]
    hits = np.sum(held, axis=0)[1:-1]
    assert np.median(hits) >= 19, hits
    assert hits.min() >= 17, hits
    squares = np.stack([each.rms.values**2 for each in data])
    error = squares.std(axis=0, ddof=1)[1:-1] / len(SEEDS) ** 0.5
    assert (np.abs(squares.mean(axis=0) - exact**2)[1:-1] < 3.5 * error).all()
    # The twin: the coherent sum is another thing, and is held by few.
    coherent = toy_paths(model).norm
    held = [(each.rms_low.values <= coherent) & (coherent <= each.rms_high.values) for each in data]
    assert np.median(np.sum(held, axis=0)[1:-1]) <= 10


@pytest.mark.parametrize("case", ["scaled skip", "norm on the trunk", "parallel highway"])
def test_signs_are_of_hops_and_not_of_the_trunk(case):
    """Over all ways to give signs to hops, the mean square is the sum of squares, exactly."""
    model, every = TOYS[case](), toy_paths(TOYS[case]())
    expansion = one_expansion(model)
    shape = len(expansion.steps), max(expansion.widths)
    signs = torch.tensor(list(product([-1.0, 1.0], repeat=shape[0] * shape[1]))).double().view(-1, *shape)
    *_, (_, probes) = expansion.descend(signs)
    squares = probes.flatten(2).square().sum(2)
    assert np.abs(squares.mean(0).sqrt().numpy() / every.rms - 1).max() < EXACT
    # A path that passes by everything has no sign, whatever the trunk does on its way.
    assert float((probes[:, 0] - probes[0, 0]).abs().max()) == 0
    # The twin: half of the ways have another mean.
    some = signs.prod(2)[:, 0] * signs.prod(2)[:, 1] > 0
    assert not np.abs(squares[some].mean(0).sqrt().numpy() / every.rms - 1).max() < EXACT


def one_expansion(model):
    def score(final):
        logits = model.readout(final)[0, -1]
        return logits[0] - logits[1]

    return expand.Expansion.of(model, model.tokenize(IDS), score, unit="write")


def test_the_seed_is_the_sample():
    model = TOYS["tanh"]()
    first, again, other = (rs.path_lengths(model, IDS, METRIC, samples=20, seed=seed).data for seed in (0, 0, 1))
    assert first.identical(again)
    assert not first.path_norm.equals(other.path_norm)
    assert first.norm.equals(other.norm)


def test_without_samples_nothing_is_said_about_single_paths():
    result = rs.path_lengths(TOYS["tanh"](), IDS, METRIC, samples=0, signs=0)
    for variable in (
        "path_norm",
        "path_norm_low",
        "path_norm_high",
        "veit",
        "effective_low",
        "effective_high",
        "effective_share",
    ):
        assert result.data[variable].isnull().all()
    assert "Veit" not in result.headline


# Counting


@pytest.mark.parametrize("widths", [[], [1], [1] * 7, [2] * 5, [1, 2, 1, 3]])
def test_count_paths(widths):
    lengths = [sum(hop > 0 for hop in hops) for hops in product(*(range(width + 1) for width in widths))]
    assert count_paths(widths) == np.bincount(lengths).tolist()


def test_share_of_paths():
    """Veit, Wilber and Belongie 2016: lengths 5 to 17 of 54 modules are 0.45 % of all paths."""
    assert share_of_paths(count_paths([1] * 54), 5, 17) == pytest.approx(sum(comb(54, k) for k in range(5, 18)) / 2**54)
    assert round(100 * share_of_paths(count_paths([1] * 54), 5, 17), 4) == 0.4537
    assert share_of_paths([1, 2, 1], 0, 2) == 1


@pytest.mark.parametrize("seed", range(20))
def test_effective_range(seed):
    weights = np.random.default_rng(seed).random(1 + seed) ** 4
    assert effective_range(weights) == shortest(weights)


def test_effective_range_of_two_that_are_as_short():
    assert effective_range([0.4, 0.4, 0.1, 0.1], coverage=0.8) == (0, 1)
    assert effective_range([0.3, 0.3, 0.0, 0.4], coverage=0.5) == (0, 1)
    assert effective_range([0.0, 1.0, 0.0]) == (1, 1)


# Language models


def llama_by_hand(hf_model, ids):
    """The writes of a tiny Llama in float64, from the paper, as functions of the stream; its x_0, and its head."""
    config, weights = hf_model.config, {name: tensor.double() for name, tensor in hf_model.state_dict().items()}
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    angles = torch.arange(ids.shape[1]).double()[:, None] * hf_model.model.rotary_emb.inv_freq.double()
    turn_by = torch.polar(torch.ones_like(angles), angles)
    hidden = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def turn(x):
        turned = torch.complex(*x.chunk(2, -1)) * turn_by
        return torch.cat([turned.real, turned.imag], -1)

    def attn(x, at):
        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{at}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, width)).transpose(1, 2)
            for name in "qkv"
        )
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (turn(k), v))
        z = torch.softmax(turn(q) @ k.mT / width**0.5 + hidden, -1) @ v
        return z.transpose(1, 2).flatten(2) @ weights[f"{at}self_attn.o_proj.weight"].T

    def mlp(x, at):
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return torch.nn.functional.silu(gate) * up @ weights[f"{at}mlp.down_proj.weight"].T

    layers = [f"model.layers.{layer}." for layer in range(LAYERS)]
    writes = [lambda x, write=write, at=at: write(x, at) for at in layers for write in (attn, mlp)]
    return (
        writes,
        weights["model.embed_tokens.weight"][ids],
        lambda x: norm(x, "model.norm.weight") @ weights["lm_head.weight"].T,
    )


@pytest.mark.parametrize("unit", ["write", "layer"])
def test_every_path_of_a_llama(unit):
    hf_model, ids = ARCHITECTURES["llama"](), some_ids(1, 4)
    writes, x0, head = llama_by_hand(hf_model, ids)
    sums = [Sum((write,)) for write in writes]
    steps = sums if unit == "write" else [sums[at : at + 2] for at in range(0, len(sums), 2)]

    def metric(x):
        logits = head(x)[0]
        return torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])

    every = enumerate_paths(steps, x0, metric)
    result = rs.path_lengths(rs.load(hf_model), ids, unit=unit)
    data = result.data.isel(prompt=0)
    assert np.abs(data.norm.values - every.norm).max() < EXACT * every.norm.max()
    assert np.abs(data.share.values - every.share).max() < EXACT * np.abs(every.share).max()
    assert float(data.kappa) == pytest.approx(every.kappa, rel=EXACT)
    assert float(data.completeness) < EXACT
    # Single paths are sampled in the model's own precision, float32.
    assert np.abs(data.path_norm.values / every.path_norm - 1).max() < 1e-5
    assert result.settings["n_paths"] == ("2^6" if unit == "write" else "2^3")


@pytest.mark.parametrize("name", ["gpt2", "gptj"])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_the_gradient_is_autograds_through_hooks(name, start):
    """In float64; these two cast nothing to float32 on the way."""
    hf_model, ids = ARCHITECTURES[name](), some_ids(1, 6)
    wide = copy.deepcopy(hf_model).double()
    leaves = []

    def put(_, args, kwargs):
        leaves.append((args[0] if args else kwargs["hidden_states"]).detach().requires_grad_())
        return ((leaves[0], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaves[0]})

    handle = blocks_of(wide)[start].register_forward_pre_hook(put, with_kwargs=True)
    logits = wide(input_ids=ids, use_cache=False).logits[0, -1]
    handle.remove()
    (expected,) = torch.autograd.grad(logits[0] - logits[1], leaves[0])
    for unit in ("write", "layer"):
        data = rs.path_lengths(rs.load(hf_model), ids, METRIC, unit=unit, start=start, samples=0, signs=0).data
        assert float(data.gradient_norm[0]) == pytest.approx(float(expected.norm()), rel=EXACT)
        assert float(data.completeness[0]) < EXACT


@pytest.mark.parametrize("name", ["neox_sequential", "neox_parallel", "gemma2", "granite"])
def test_completeness_of_other_architectures(name):
    result = rs.path_lengths(rs.load(ARCHITECTURES[name]()), some_ids(2, 5), METRIC, samples=4)
    assert result.data.completeness.max() < EXACT
    assert result.check.passed
    assert result.settings["n_paths"] == ("3^3" if name == "neox_parallel" else "2^6")


@pytest.mark.parametrize("kind", ["attn", "mlp"])
@pytest.mark.parametrize("name", ["llama", "neox_parallel"])
def test_completeness_notices_a_planted_error(name, kind, monkeypatch):
    """The twin of the test above."""
    model = rs.load(ARCHITECTURES[name]())
    wide = model.in_float64()
    plant(monkeypatch, CausalTrunk, "write", kind)
    monkeypatch.setattr(type(model), "in_float64", lambda self: wide)
    result = rs.path_lengths(model, some_ids(1, 5), METRIC, samples=0, signs=0)
    assert result.data.completeness.max() > 1e-5
    assert not result.check.passed


def test_smollm2_by_write(smollm2):
    result = rs.path_lengths(smollm2, IOI, rs.logit_diff(" Mary", " John"), samples=0, signs=0)
    data = result.data.isel(prompt=0)
    assert float(data.completeness) <= 1e-8
    assert float(data.gradient_norm) == pytest.approx(30.9, rel=0.05)
    assert float(data.kappa) == pytest.approx(1.9e4, rel=0.05)
    assert int(data.norm.values.argmax()) == 14
    assert float(data.share.sum()) == pytest.approx(1, abs=1e-8)
    assert data["count"].values[30] == pytest.approx(comb(60, 30))
    assert "2^60 paths by write from layer 0; |c_k| peaks at length 14" in result.headline
    # The Hugging Face model's own gradient at its first block's input, in float32.
    ids = smollm2.tokenizer(IOI, return_tensors="pt")["input_ids"]
    mary, john = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    leaf = smollm2.hf_model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = smollm2.hf_model(inputs_embeds=leaf, use_cache=False).logits[0, -1]
    (expected,) = torch.autograd.grad(logits[mary] - logits[john], leaf)
    assert float(data.gradient_norm) == pytest.approx(float(expected.norm()), rel=1e-4)


def test_smollm2_by_layer(smollm2):
    data = rs.path_lengths(smollm2, IOI, rs.logit_diff(" Mary", " John"), unit="layer", samples=0, signs=0).data.isel(
        prompt=0
    )
    assert float(data.completeness) <= 1e-8
    assert float(data.gradient_norm) == pytest.approx(30.9, rel=0.05)
    assert float(data.kappa) == pytest.approx(2.7e3, rel=0.05)
    assert int(data.norm.values.argmax()) == 12


def test_prompts_are_expanded_each_on_its_own():
    model = rs.load(ARCHITECTURES["llama"](), tokenizer=tokenizer())
    prompts = ["w1 w2 w3 w4 w5", "w9 w8 w7"]
    batch = rs.path_lengths(model, prompts, rs.log_prob([4, 5]), samples=0, signs=0).data
    for row, (prompt, answer) in enumerate(zip(prompts, (4, 5), strict=True)):
        alone = rs.path_lengths(model, prompt, rs.log_prob(answer), samples=0, signs=0).data
        assert np.abs(batch.norm.values[row] / alone.norm.values[0] - 1).max() < EXACT
    assert batch.text.values.tolist() == ["w1w2w3w4w5", "w9w8w7"]


# Errors

WRONG = {
    "unit": ({"unit": "head"}, SiteError, 'unit="head"', "is not a unit of paths", 'unit="write" or unit="layer"'),
    "start": ({"start": 5}, SiteError, "start=5", "toy has layers 0-4", "give one of them"),
    "negative start": ({"start": -1}, SiteError, "start=-1", "toy has layers 0-4", "give one of them"),
    "flat metric": (
        {"metric": lambda logits: 0 * logits[:, -1, 0]},
        MetricError,
        "the gradient of '<lambda>' is 0 everywhere",
        "nothing to split",
        "such as rs.logit_diff(...)",
    ),
    "metric at its minimum": (
        {"metric": rs.kl_from_base()},
        MetricError,
        "the gradient of 'KL from the base run' is",
        "nothing to split",
        "such as rs.logit_diff(...)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice(case):
    options, kind, *parts = WRONG[case]
    with unchecked(), pytest.raises(kind) as error:
        rs.path_lengths(TOYS["tanh"](), IDS, **{"metric": METRIC, "samples": 0, "signs": 0, **options})
    assert says(error, *parts)


def test_the_divergence_from_the_base_run_has_no_gradient_there():
    """Also where the two runs differ by rounding."""
    model = rs.load(ARCHITECTURES["llama"](), tokenizer=tokenizer())
    with pytest.raises(MetricError, match="nothing to split"):
        rs.path_lengths(model, ["w1 w2 w3 w4 w5", "w9 w8 w7"], rs.kl_from_base(), samples=0, signs=0)


def test_the_model_is_as_it_was():
    hf_model = ARCHITECTURES["llama"]().train()
    model = rs.load(hf_model)
    before = state_of(hf_model)
    rs.path_lengths(model, some_ids(1, 4), METRIC, samples=2)
    assert state_of(hf_model) == before

    def fail(*_):
        raise Planted

    blocks_of(hf_model)[1].register_forward_pre_hook(fail)
    before = state_of(hf_model)
    with pytest.raises(UnsupportedModelError, match="Planted"):
        rs.path_lengths(model, some_ids(1, 4), METRIC, samples=2)
    assert state_of(hf_model) == before


def test_the_toy_is_what_it_says():
    """The sum of a toy's writes, read by the library, is its own loop."""
    for make in TOYS.values():
        model = make()
        stream = rs.read(model, IDS, sites=["resid_pre", "attn", "mlp", "resid_post"])
        assert stream.check.error < 1e-15
        x = model.embedding[IDS]
        for layer, pair in enumerate(model.branches):
            assert torch.equal(stream[Site(layer, "resid_pre")], x)
            x = model.trunk(model.tokenize(IDS)).layer(layer, x)
            pre = stream[Site(layer, "resid_pre")]
            assert torch.allclose(x, through(model, pair, pre, model.maps[layer]), rtol=1e-14, atol=1e-14)
