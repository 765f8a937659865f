"""Forward paths against every single path multiplied out, direct logit attribution by hooks, and linearity itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from measure.test_paths import IDS, PLAIN, POSITIONS, TOYS, WIDTH, ToyModel, jacobian, same, steps_of
from stream.test_read import unchecked
from tiny import PARALLEL, SUPPORTED, blocks_of, some_ids, tokenizer

import resstream as rs
from resstream.errors import EditError, MetricError, UnsupportedModelError
from resstream.models import frozen as frozen_module
from resstream.models.carry import UNCHANGED
from resstream.models.causal_lm import CausalTrunk
from resstream.sites import Site

EXACT = 1e-10  # float64, relative
IOI = "When Mary and John went to the store, John gave a drink to"


# What a model that holds its scales holds just now.
HELD: set[str] = set()


@dataclass(frozen=True, eq=False)
class Scaled:
    """A function that is linear once its scale is held: f(x) = scale(x) * linear(x) + shift."""

    part: str
    linear: Callable[[torch.Tensor], torch.Tensor]
    scale: Callable[[torch.Tensor], torch.Tensor]
    shift: torch.Tensor | float = 0.0

    def __call__(self, x):
        scale = self.scale(x).detach() if self.part in HELD else self.scale(x)
        return scale * self.linear(x) + self.shift

    def held(self, x):
        """The linear part of it, as a matrix, written out."""
        basis = torch.eye(x.numel(), dtype=torch.float64).view(-1, *x.shape)
        return torch.stack([(self.scale(x) * self.linear(each)).flatten() for each in basis], dim=1)


class HoldingToy(ToyModel):
    """A toy that can hold its scales, part by part."""

    @contextmanager
    def frozen(self, part):
        HELD.add(part)
        try:
            yield
        finally:
            HELD.remove(part)

    def readout(self, x, vocab=None):
        logits = Scaled("readout", same, lambda x: 1 / (1 + x.abs()))(x) @ self.head
        return logits if vocab is None else logits[..., list(vocab)]


def random_matrix(seed, size=WIDTH):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, size, dtype=torch.float64, generator=rng) / size**0.5


def holding_branch(kind, seed):
    """tanh of a linear map of the stream, in which attention mixes positions."""
    weights, mixing = random_matrix(seed), random_matrix(seed + 50, POSITIONS).tril()

    def linear(x):
        return (mixing @ x if kind == "attn" else x) @ weights

    return Scaled(kind, linear, lambda x: torch.tanh(linear(x)) / linear(x))


def skip(factor):
    return Scaled("trunk", lambda x: factor * x, torch.ones_like)


def bent():
    return Scaled("trunk", same, lambda x: torch.tanh(x) / x)


def norm(seed):
    scale, shift = 1 + 0.3 * random_matrix(seed)[:2]

    def centred(x):
        return x - x.mean(-1, keepdim=True)

    return Scaled(
        "trunk", centred, lambda x: scale * (centred(x).square().mean(-1, keepdim=True) + 1e-5).rsqrt(), shift
    )


HOLDING = {
    "sequential": lambda: HoldingToy(
        [(holding_branch("attn", n), holding_branch("mlp", n + 10)) for n in range(3)],
        maps=[((skip(0.8), same), (same, norm(1))), ((bent(), norm(2)), PLAIN[1]), ((same, bent()), (skip(1.2), same))],
    ),
    "parallel": lambda: HoldingToy(
        [(holding_branch("attn", n + 20), holding_branch("mlp", n + 30)) for n in range(4)],
        layout="parallel",
        maps=[((skip(0.8), norm(3)), PLAIN[1]), ((bent(), same), PLAIN[1]), PLAIN, ((skip(-0.9), bent()), PLAIN[1])],
    ),
}


def linear_map(function, x, gauge, *, on_trunk):
    """The matrix that a gauge puts in the place of a branch, or of what the trunk does."""
    if gauge == "jacobian":
        return jacobian(function, x)
    if gauge == "direct" and not on_trunk:
        return torch.zeros(x.numel(), x.numel(), dtype=torch.float64)
    return function.held(x) if isinstance(function, Scaled) else torch.eye(x.numel(), dtype=torch.float64)


def every_forward_path(model, gauge):
    """Each path's end-to-end term, with explicit matrices, by where it starts and the hops it takes; and the logit.

    A step is two levels: what is added to what passes by, and what becomes of the sum.
    """
    x = model.embedding[IDS]
    # Where paths start: a vector, the level above which it runs, and whether it is a hop.
    starts, levels = {"embed": [(x.flatten(), 0, 0)], "branches": [], "trunk": []}, []
    for some in steps_of(model, "write", 0):
        for parts, passing, state in ((some.parts, some.before, x), ((), some.after, some.total(x))):
            through = linear_map(passing, state, gauge, on_trunk=True)
            hops = [linear_map(part, state, gauge, on_trunk=False) for part in parts]
            levels.append((through, hops))
            starts["trunk"].append((passing(state).flatten() - through @ state.flatten(), len(levels), 0))
            for part, matrix in zip(parts, hops, strict=True):
                starts["branches"].append((part(state).flatten() - matrix @ state.flatten(), len(levels), 1))
        x = some(x)
    leaf = x.detach().requires_grad_()
    logits = (torch.nn.functional.softsign(leaf) @ model.head)[0, -1]
    value = logits[0] - logits[1]
    (top,) = torch.autograd.grad(value, leaf)
    if gauge != "jacobian":
        top = torch.zeros_like(x)
        top[0, -1] = (model.head[:, 0] - model.head[:, 1]) / (1 + x[0, -1].abs())
    terms = {start: np.zeros(1 + len(levels) // 2) for start in starts}
    for start, vectors in starts.items():
        for vector, level, taken in vectors:
            above = levels[level:]
            for path in product(*(range(-1, len(hops)) for _, hops in above)):
                carried = vector
                for hop, (through, hops) in zip(path, above, strict=True):
                    carried = (through if hop < 0 else hops[hop]) @ carried
                terms[start][taken + sum(hop >= 0 for hop in path)] += float(top.flatten() @ carried)
    return terms, float(value.detach())


def the_terms_are_every_path(model, gauge):
    terms, value = every_forward_path(model, gauge)
    result = rs.logit_by_path_length(model, IDS, 0, 1, gauge=gauge)
    found = result.data.isel(prompt=0)
    total = sum(terms.values())
    size = np.abs(total).max()
    assert np.abs(found.term.values - total).max() < EXACT * size
    assert float(found.term.sum() + found.constant) == pytest.approx(value, abs=EXACT)
    assert np.abs(found.term_from.sum("source").values - total).max() < EXACT * size
    of = {"embed": ["embed"], "branches": list(model.writes), "trunk": ["trunk"] if model.carried else []}
    for start, sources in of.items():
        some = found.term_from.sel(source=sources).sum("source").values
        assert np.abs(some - terms[start]).max() < EXACT * size
    assert result.check.passed


@pytest.mark.parametrize("case", TOYS)
def test_the_jacobian_gauge_is_every_path(case):
    the_terms_are_every_path(TOYS[case](), "jacobian")


@pytest.mark.parametrize("gauge", ["direct", "frozen", "jacobian"])
@pytest.mark.parametrize("case", HOLDING)
def test_every_gauge_carries_what_the_trunk_does(case, gauge):
    """A scaled skip, a norm and a tanh on the trunk: their linear maps are on each path, and what is left starts."""
    the_terms_are_every_path(HOLDING[case](), gauge)
    assert not HELD


@pytest.mark.parametrize("gauge", ["direct", "frozen", "jacobian"])
@pytest.mark.parametrize("step", ["0.attn", "2.attn"])
def test_a_trunk_factor_that_is_forgotten_is_noticed(step, gauge, monkeypatch):
    """By the sum of all terms, and by the paths: the twin of the test above."""
    honest = ToyModel.carry
    monkeypatch.setattr(
        HoldingToy, "carry", lambda self, sites: UNCHANGED if str(sites[0]) == step else honest(self, sites)
    )
    model = HOLDING["parallel"]() if step == "0.attn" else HOLDING["sequential"]()
    assert not rs.logit_by_path_length(model, IDS, 0, 1, gauge=gauge).check.passed
    with pytest.raises(AssertionError):
        the_terms_are_every_path(model, gauge)


def test_what_the_trunk_does_is_said_once():
    result = rs.logit_by_path_length(TOYS["scaled skip"](), IDS, 0, 1, gauge="jacobian")
    assert result.settings["trunk"] == "trunk factors carried at 8 of 8 steps"
    assert repr(result).count("trunk factors carried at 8 of 8 steps") == 1
    assert result.plot().get_title(loc="left").count("trunk factors carried at 8 of 8 steps") == 1
    plain = rs.logit_by_path_length(TOYS["tanh"](), IDS, 0, 1, gauge="jacobian")
    assert "trunk" not in plain.settings
    assert "trunk" not in repr(plain) + plain.plot().get_title(loc="left")
    assert "trunk" not in plain.data.source


def test_a_remainder_that_is_miscounted_is_noticed():
    model = TOYS["tanh"]()
    terms, _ = every_forward_path(model, "jacobian")
    total = sum(terms.values())
    found = rs.logit_by_path_length(model, IDS, 0, 1, gauge="jacobian").data.isel(prompt=0)
    assert not np.abs(found.term.values - np.roll(total, 1)).max() < EXACT * np.abs(total).max()


def test_a_remainder_of_the_trunk_that_is_counted_as_a_hop_is_noticed():
    model = HOLDING["sequential"]()
    terms, _ = every_forward_path(model, "frozen")
    miscounted = terms["embed"] + terms["branches"] + np.roll(terms["trunk"], 1)
    found = rs.logit_by_path_length(model, IDS, 0, 1, gauge="frozen").data.isel(prompt=0)
    assert not np.abs(found.term.values - miscounted).max() < EXACT * np.abs(miscounted).max()


@pytest.mark.parametrize("gauge", ["direct", "frozen", "jacobian"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_all_terms_make_the_logit(name, gauge):
    hf_model = SUPPORTED[name]()
    model = rs.load(hf_model, name=name)
    ids = some_ids(2, 6)
    result = rs.logit_by_path_length(model, ids, 5, 9, gauge=gauge)
    assert result.check.passed
    assert result.check.error < 1e-8
    with torch.no_grad():
        logits = hf_model(ids).logits[:, -1].double()
    expected = (logits[:, 5] - logits[:, 9]).numpy()
    total = (result.data.term.sum("path_length") + result.data.constant).values
    assert np.abs(total - expected).max() < 1e-4 * np.abs(logits.numpy()).max()
    assert result.settings["gauge"] == gauge
    assert result.settings["meaning"]
    widths = 1 + model.n_layers * (1 if name in PARALLEL else 2)
    assert result.data.sizes["path_length"] == widths


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox_parallel", "granite"])
def test_the_direct_gauge_is_direct_logit_attribution(name):
    """By plain hooks: each branch's write times the unembedding, at the final norm's own scale."""
    hf_model = SUPPORTED[name]().double()
    ids = some_ids(1, 6)
    result = rs.logit_by_path_length(rs.load(hf_model, name=name), ids, 5, gauge="direct").data.isel(prompt=0)
    stream = []
    handles = [
        block.register_forward_hook(lambda _, args, out: stream.append(out if torch.is_tensor(out) else out[0]))
        for block in blocks_of(hf_model)
    ]
    first = []
    pre = blocks_of(hf_model)[0].register_forward_pre_hook(
        lambda _, args, kwargs: first.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        hf_model(ids)
    for handle in [*handles, pre]:
        handle.remove()
    final = stream[-1][0, -1]
    norm = {"gpt2": "transformer.ln_f", "neox_parallel": "gpt_neox.final_layer_norm"}.get(name, "model.norm")
    norm = hf_model.get_submodule(norm)
    head = hf_model.get_output_embeddings().weight[5].detach() * norm.weight.detach()
    head = head / getattr(hf_model.config, "logits_scaling", 1.0)
    centred = final - final.mean() if isinstance(norm, torch.nn.LayerNorm) else final
    eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
    scale = (centred.square().mean() + eps).rsqrt()
    head = head - head.mean() if isinstance(norm, torch.nn.LayerNorm) else head
    embedded = float(first[0][0, -1] @ head * scale)
    # The oracle is the model in double precision, in which an RMS norm still rounds to single.
    close = 1e-8 if isinstance(norm, torch.nn.LayerNorm) else 1e-6
    assert float(result.term[0]) == pytest.approx(embedded, abs=close)
    writes = float((final - first[0][0, -1]) @ head * scale)
    assert float(result.term[1]) == pytest.approx(writes, abs=close)
    assert np.abs(result.term.values[2:]).max() == 0


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_frozen_branch_is_linear_and_keeps_its_value(name):
    """f(x) = <df/dx, x> + <df/db, b>, and f(2x) under frozen parts would be another f: the parts are those of x."""
    model = rs.load(SUPPORTED[name](), name=name).in_float64()
    tokens = model.tokenize(some_ids(1, 5))
    trunk = model.trunk(tokens)
    x = trunk.x0.detach().clone().requires_grad_()
    biases = [value for key, value in model.hf_model.named_parameters() if key.endswith("bias")]
    rng = torch.Generator().manual_seed(0)
    for kind in ("attn", "mlp", "readout"):
        with model.frozen(kind):
            out = model.readout(x) if kind == "readout" else trunk.write(Site(1, kind), x)
        plain = model.readout(x) if kind == "readout" else trunk.write(Site(1, kind), x)
        assert float((out - plain).detach().abs().max()) < 1e-12 * max(1, float(plain.detach().abs().max()))
        probe = torch.randn(out.shape, generator=rng, dtype=out.dtype)
        slopes = torch.autograd.grad((out * probe).sum(), [x, *biases], allow_unused=True)
        linear = sum(
            (value * slope).sum() for value, slope in zip([x, *biases], slopes, strict=True) if slope is not None
        )
        assert float(linear.detach()) == pytest.approx(float((out * probe).sum().detach()), rel=1e-9, abs=1e-11)
        assert not model.hf_model.training
        assert all(not module._forward_hooks for module in model.hf_model.modules())


def test_a_branch_that_stays_bilinear_is_refused(monkeypatch):
    """With gates left alone, no way of holding activations makes a gated MLP linear."""
    monkeypatch.setattr(frozen_module, "_ACTIVATIONS", set())
    monkeypatch.setattr(frozen_module, "_slope_of", lambda *_: None)
    model = rs.load(SUPPORTED["llama"](), name="llama")
    with pytest.raises(UnsupportedModelError, match=r'does not become linear .* use gauge="jacobian"'):
        rs.logit_by_path_length(model, some_ids(1, 5), 5, 9)


def test_the_check_notices_a_planted_error(monkeypatch):
    model = rs.load(SUPPORTED["llama"](), name="llama")
    write = CausalTrunk.write

    def wrong(self, site, x):
        return 1.001 * write(self, site, x) if site == Site(1, "mlp") and not x.requires_grad else write(self, site, x)

    assert rs.logit_by_path_length(model, some_ids(1, 5), 5, 9, gauge="direct").check.passed
    wide = model.in_float64()
    monkeypatch.setattr(CausalTrunk, "write", wrong)
    monkeypatch.setattr(type(model), "in_float64", lambda self: wide)
    assert not rs.logit_by_path_length(model, some_ids(1, 5), 5, 9, gauge="direct").check.passed


def test_smollm2_in_all_gauges(smollm2):
    for gauge, kappa in (("direct", 2), ("frozen", 100), ("jacobian", 1e5)):
        result = rs.logit_by_path_length(smollm2, IOI, " Mary", " John", gauge=gauge)
        data = result.data.isel(prompt=0)
        assert result.check.error < 1e-8
        assert float(data.logit) == pytest.approx(6.1196, abs=2e-4)
        assert float(data.kappa) < kappa
    # A branch behind a norm does not change with the scale of its input, so its derivative carries nearly nothing.
    assert abs(float(data.constant)) > 0.99 * float(data.logit)


def test_wrong_choices():
    model = rs.load(SUPPORTED["llama"](), name="llama", tokenizer=tokenizer())
    ids = some_ids(1, 5)
    with unchecked(), pytest.raises(MetricError, match=r'gauge="free" is not known; choose from .direct., .frozen.'):
        rs.logit_by_path_length(model, ids, 5, gauge="free")
    with pytest.raises(MetricError, match="the two answers are the same token"):
        rs.logit_by_path_length(model, ids, 5, 5)
    with rs.edited(model, rs.Zero("0.attn")) as edited, pytest.raises(EditError, match="pass the model that"):
        rs.logit_by_path_length(edited, ids, 5)
    with pytest.raises(UnsupportedModelError, match=r'no frozen form.*use gauge="jacobian" or gauge="direct"'):
        rs.logit_by_path_length(TOYS["tanh"](), IDS, 0, 1)
