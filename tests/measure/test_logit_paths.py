"""Forward paths against every single path multiplied out, direct logit attribution by hooks, and linearity itself."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from measure.test_paths import IDS, TOYS, steps_of
from stream.test_read import unchecked
from tiny import PARALLEL, SUPPORTED, blocks_of, some_ids, tokenizer

import resstream as rs
from resstream.errors import EditError, MetricError, UnsupportedModelError
from resstream.models import frozen as frozen_module
from resstream.models.causal_lm import CausalTrunk
from resstream.sites import Site

EXACT = 1e-10  # float64, relative
IOI = "When Mary and John went to the store, John gave a drink to"


def every_forward_path(model, gauge):
    """Each path's end-to-end term, by start and by the hops it takes above it, with explicit matrices."""
    x = model.embedding[IDS]
    size = x.numel()
    starts, matrices = [x.flatten()], []
    for step in steps_of(model, "write", 0):
        maps, rest = [], []
        for part in step:
            slope = torch.autograd.functional.jacobian(part, x).reshape(size, size)
            slope = slope if gauge == "jacobian" else torch.zeros_like(slope)
            maps.append(slope)
            rest.append(part(x).flatten() - slope @ x.flatten())
        matrices.append(maps)
        starts.append(rest)
        x = x + sum(part(x) for part in step)
    leaf = x.detach().requires_grad_()
    logits = (torch.nn.functional.softsign(leaf) @ model.head)[0, -1]
    value = logits[0] - logits[1]
    (top,) = torch.autograd.grad(value, leaf)
    terms = np.zeros(1 + len(matrices))
    for begin in range(len(starts)):
        for vector in [starts[0]] if begin == 0 else starts[begin]:
            above = matrices[begin:]
            for hops in product(*(range(-1, len(maps)) for maps in above)):
                carried = vector
                for hop, maps in zip(hops, above, strict=True):
                    carried = carried if hop < 0 else maps[hop] @ carried
                taken = sum(hop >= 0 for hop in hops) + (begin > 0)
                terms[taken] += float(top.flatten() @ carried)
    return terms, float(value.detach())


@pytest.mark.parametrize("case", TOYS)
def test_the_jacobian_gauge_is_every_path(case):
    model = TOYS[case]()
    terms, value = every_forward_path(model, "jacobian")
    found = rs.logit_by_path_length(model, IDS, 0, 1, gauge="jacobian").data.isel(prompt=0)
    assert np.abs(found.term.values - terms).max() < EXACT * np.abs(terms).max()
    assert float(found.term.sum() + found.constant) == pytest.approx(value, abs=EXACT)
    assert np.abs(found.term_from.sum("source").values - terms).max() < EXACT * np.abs(terms).max()


def test_a_remainder_that_is_miscounted_is_noticed():
    model = TOYS["tanh"]()
    terms, _ = every_forward_path(model, "jacobian")
    others = np.roll(terms, 1)
    found = rs.logit_by_path_length(model, IDS, 0, 1, gauge="jacobian").data.isel(prompt=0)
    assert not np.abs(found.term.values - others).max() < EXACT * np.abs(terms).max()


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
