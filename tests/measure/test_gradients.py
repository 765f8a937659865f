"""Attribution patching against autograd on plainly hooked models, brute force, and nets on which it is exact."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from measure.test_patching import CLEAN, CORRUPTED, IOI, METRIC, difference
from models.test_inside import place_of
from stream.test_read import ARCHITECTURES, WRITERS, kinds_of, like
from tiny import LAYERS, blocks_of, tokenizer

import resstream as rs
from resstream.measure.patches import gradient_sweep
from resstream.stream import slopes

CLOSE = 1e-5  # float32, relative to the largest cell; a planted error is 100 times as large
NAMES = ("gpt2", "llama", "neox_parallel", "gemma2", "granite")
HEADED = ("z", "q", "k", "v", "pattern")
PROMPTS = tuple(zip(CLEAN, CORRUPTED, strict=True))


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return ARCHITECTURES[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def llama():
    return ARCHITECTURES["llama"]()


@pytest.fixture(scope="module")
def toy(llama):
    return rs.load(llama, name="toy", tokenizer=tokenizer())


# By hand: plain hooks that keep, replace or stop what passes the modules of an untouched model.


class ByHand:
    """One plain run of one prompt, with every value and a way to the slope of a score in it.

    Attributes:
        values: the value at every site, position first; a pattern's head first.
        logits: "pos vocab".
    """

    def __init__(self, name, hf_model, ids, put=None, stopped=None):
        self.put, self.stopped, self.values, self._raw, self._view = put or {}, stopped, {}, {}, {}
        self.factor = getattr(hf_model.config, "residual_multiplier", 1.0)
        handles, parallel = [], "resid_mid" not in kinds_of(name)
        for layer, block in enumerate(blocks_of(hf_model)):
            handles.append(block.register_forward_pre_hook(self._entering(layer), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leaving(layer, "resid_post")))
            for kind in ("z", "q", "k", "v", "neuron"):
                path, reads, columns = place_of(name, kind)
                module, keep = block.get_submodule(path), self._inside(f"{layer}.{kind}", columns)
                if reads:
                    handles.append(module.register_forward_pre_hook(lambda _, args, keep=keep: (keep(args[0]),)))
                else:
                    handles.append(module.register_forward_hook(lambda _, args, out, keep=keep: keep(out)))
            for kind, path in zip(("attn", "mlp"), WRITERS[name], strict=True):
                handles.append(block.get_submodule(path).register_forward_hook(self._leaving(layer, kind)))
        try:
            with torch.enable_grad():
                out = hf_model(input_ids=ids, use_cache=False, output_attentions=True)
        finally:
            for handle in handles:
                handle.remove()
        self.logits = out.logits[0]
        for layer, pattern in enumerate(out.attentions):
            self._keep(f"{layer}.pattern", pattern, lambda raw: raw[0])
            if not parallel:
                # The middle of a plain trunk moves just as far as what attention writes.
                write = f"{layer}.attn"
                self.values[f"{layer}.resid_mid"] = self.values[f"{layer}.resid_pre"] + self.values[write]
                self._raw[f"{layer}.resid_mid"], self._view[f"{layer}.resid_mid"] = self._raw[write], self._view[write]

    def slopes(self, score):
        """The slope of a score in the value at every site; 0 where there is no way up."""
        found = torch.autograd.grad(score, list(self._raw.values()), allow_unused=True, retain_graph=True)
        raws = zip(self._raw.items(), found, strict=True)
        slopes = {
            site: self._view[site](torch.zeros_like(raw) if slope is None else slope) for (site, raw), slope in raws
        }
        return {
            site: slope / self.factor**2 if site.split(".")[1] in ("attn", "mlp", "resid_mid") else slope
            for site, slope in slopes.items()
        }

    def _keep(self, site, raw, view):
        self._raw[site], self._view[site], self.values[site] = raw, view, view(raw).detach()
        return raw

    def _entering(self, layer):
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            x = self._own(f"{layer}.resid_pre", x, lambda raw: raw[0], lambda raw, new: new[None])
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        return hook

    def _leaving(self, layer, kind):
        factor = 1.0 if kind == "resid_post" else self.factor

        def hook(module, args, output):
            raw = output if isinstance(output, torch.Tensor) else output[0]
            new = self._own(
                f"{layer}.{kind}", raw, lambda raw: raw[0] * factor, lambda raw, new: (new / factor).view(raw.shape)
            )
            return like(output, new.detach() if kind != "resid_post" and layer == self.stopped else new)

        return hook

    def _inside(self, site, columns):
        def view(raw):
            return raw.reshape(-1, raw.shape[-1])[:, columns]

        def replaced(raw, new):
            flat = raw.reshape(-1, raw.shape[-1]).clone()
            flat[:, columns] = new
            return flat.view(raw.shape)

        return lambda raw: self._own(site, raw, view, replaced)

    def _own(self, site, raw, view, replaced):
        raw = replaced(raw, self.put[site]).detach().requires_grad_() if site in self.put else raw.clone()
        return self._keep(site, raw, view)


@contextmanager
def in_the_open(hf_model):
    """Attention computed step by step, so that patterns have slopes."""
    before = hf_model.config._attn_implementation
    hf_model.set_attn_implementation("eager")
    try:
        yield
    finally:
        hf_model.set_attn_implementation(before)


def cells_of(kind, move, slope):
    """Move times slope, "part pos"; states and writes have one part."""
    product_ = move.double() * slope.double()
    if kind == "pattern":
        return product_.sum(-1)
    if kind == "neuron":
        return product_.T
    return product_.sum(-1).T if product_.ndim == 3 else product_.sum(-1)[None]


def ids_of(model, row, direction="denoise"):
    """The token ids of a pair: the run that is patched, and the one that values come from."""
    clean, corrupted = (model.tokenize(prompt).ids for prompt in PROMPTS[row])
    return (corrupted, clean) if direction == "denoise" else (clean, corrupted)


def by_hand(name, hf_model, model, kinds, estimate, parts, direction="denoise"):
    """A grid "prompt site layer part pos" from a function of (target run, donor run, site, ids, row)."""
    grid = np.full((len(CLEAN), len(kinds), LAYERS, parts, 5), np.nan)
    with in_the_open(hf_model):
        for row in range(len(CLEAN)):
            ids = ids_of(model, row, direction)
            target, donor = (ByHand(name, hf_model, each) for each in ids)
            for (k, kind), layer in product(enumerate(kinds), range(LAYERS)):
                found = estimate(target, donor, f"{layer}.{kind}", ids, row)
                grid[row, k, layer, : len(found), : found.shape[1]] = found
    return grid


def changes(result):
    """The change of the metric that each cell is estimated to make, "prompt site layer part pos"."""
    start = "corrupted" if result.settings["direction"] == "denoise" else "clean"
    change = (result.data.metric - result.data[start]).transpose("prompt", "site", "layer", ..., "position").values
    return change if change.ndim == 5 else change[:, :, :, None]


def agree(found, expected, close=CLOSE):
    assert (np.isnan(found) == np.isnan(expected)).all()
    assert np.nanmax(np.abs(expected)) > 1e-3, "and there is something to agree on"
    assert np.nanmax(np.abs(found - expected)) < close * np.nanmax(np.abs(expected))


def kinds_and_parts(name):
    """The kinds of site that share their axes, and how many parts they have at most."""
    return {
        "stream": (kinds_of(name), 1),
        "heads": (HEADED, 4),
        "neurons": (("neuron",), 128 if name == "gpt2" else 48),
    }


def asked(name, group):
    return {"sites": kinds_and_parts(name)[group][0], **({"neurons": "each"} if group == "neurons" else {})}


# Estimates at the run itself


def estimates_are_autograds(name, hf_model, model, group, direction):
    kinds, parts = kinds_and_parts(name)[group]

    def estimate(target, donor, site, ids, row):
        slope = target.slopes(difference(target.logits, row))[site]
        return cells_of(site.split(".")[1], donor.values[site] - target.values[site], slope)

    expected = by_hand(name, hf_model, model, kinds, estimate, parts, direction)
    found = rs.attribution_patching(model, CLEAN, CORRUPTED, METRIC, direction=direction, **asked(name, group))
    agree(changes(found), expected)
    assert found.check.passed


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("group", ["stream", "heads", "neurons"])
def test_estimates_are_autograds(group, direction, name, hf_model, model):
    """Every kind of site, prompts of unequal length, each with an answer of its own; case 18."""
    estimates_are_autograds(name, hf_model, model, group, direction)


def off_by_a_thousandth(monkeypatch, owner, method):
    """Plant an error of 0.1 % in what a function returns."""
    honest = getattr(owner, method)

    def planted(*args, **kwargs):
        found = honest(*args, **kwargs)
        return [1.001 * each for each in found] if isinstance(found, list) else 1.001 * found

    monkeypatch.setattr(owner, method, planted)


PLANTS = {
    "the way down": (slopes, "pull_through"),
    "the top": (gradient_sweep, "_top"),
    "the sum": (gradient_sweep, "estimates"),
}


@pytest.mark.parametrize("group", ["stream", "heads"])
@pytest.mark.parametrize("plant", PLANTS)
def test_estimates_that_are_off_are_noticed(plant, group, llama, toy, monkeypatch):
    """The twin of the test above."""
    off_by_a_thousandth(monkeypatch, *PLANTS[plant])
    with pytest.raises(AssertionError):
        estimates_are_autograds("llama", llama, toy, group, "denoise")


def test_a_layer_that_is_taken_apart_wrongly_fails_the_check(toy, monkeypatch):
    honest = slopes._apart

    def planted(model, trunk, layer, x, *rest):
        return honest(model, trunk, layer, 1.001 * x.roll(1, -1), *rest)

    monkeypatch.setattr(slopes, "_apart", planted)
    check = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC).check
    assert not check.passed
    assert check.name == "layers taken apart = base run"


def test_heads_are_their_z(model):
    """A head's write moves with its z alone, so both have the same estimate."""
    heads, z = (rs.attribution_patching(model, CLEAN, CORRUPTED, METRIC, sites=kind) for kind in ("head", "z"))
    assert np.array_equal(changes(heads), changes(z), equal_nan=True)


# The way from target to donor


@pytest.mark.parametrize("kind", ["resid_pre", "resid_mid", "resid_post", "attn", "mlp", *HEADED, "neuron"])
def test_steps_are_means_over_the_way(kind, llama, toy):
    """Three points, by hand: the whole value of a layer is put at each, and the slopes there are averaged."""

    def estimate(target, donor, site, ids, row):
        if kind == "pattern":
            return cells_of(
                kind, donor.values[site] - target.values[site], pattern_slope(site, target, donor, ids, row)
            )
        way = [1 / 6, 1 / 2, 5 / 6]
        if kind == "resid_mid":
            return cells_of(
                kind, donor.values[site] - target.values[site], middle_slope(site, target, donor, ids, way, row)
            )
        points = [target.values[site] + part * (donor.values[site] - target.values[site]) for part in way]
        runs = [ByHand("llama", llama, ids[0], put={site: point}) for point in points]
        slope = sum(run.slopes(difference(run.logits, row))[site] for run in runs) / 3
        return cells_of(kind, donor.values[site] - target.values[site], slope)

    def middle_slope(site, target, donor, ids, way, row):
        """A middle is put there by what attention writes."""
        write = site.replace("resid_mid", "attn")
        points = [target.values[write] + part * (donor.values[site] - target.values[site]) for part in way]
        runs = [ByHand("llama", llama, ids[0], put={write: point}) for point in points]
        return sum(run.slopes(difference(run.logits, row))[write] for run in runs) / 3

    def pattern_slope(site, target, donor, ids, row):
        """A pattern is put there by what it makes of the values: z, in which its slope is linear."""
        z, v = (site.replace("pattern", each) for each in "zv")
        values = target.values[v].repeat_interleave(2, 1)
        total = 0
        for part in (1 / 6, 1 / 2, 5 / 6):
            pattern = target.values[site] + part * (donor.values[site] - target.values[site])
            run = ByHand("llama", llama, ids[0], put={z: torch.einsum("hqk,khd->qhd", pattern, values)})
            slope = run.slopes(difference(run.logits, row))[z]
            total = total + torch.einsum("qhd,khd->hqk", slope, values)
        return total / 3

    parts = 1 if kind in kinds_of("llama") else 48 if kind == "neuron" else 4
    each = {"neurons": "each"} if kind == "neuron" else {}
    expected = by_hand("llama", llama, toy, [kind], estimate, parts)
    found = changes(rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=kind, steps=3, **each))
    agree(found, expected[..., : found.shape[3], :])
    once = changes(rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=kind, **each))
    with pytest.raises(AssertionError):
        agree(once, expected[..., : found.shape[3], :], close=100 * CLOSE)


@pytest.mark.parametrize("sites", [["resid_pre", "attn", "mlp"], ["z", "q", "k", "pattern"], "neuron"])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_more_steps_add_up_to_the_whole_patch(sites, direction, toy):
    """Completeness: a layer's estimates together come to what the executor finds, with the whole value patched."""
    every = {"positions": "all", **({"heads": "all"} if "z" in sites else {})}
    exact = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=sites, direction=direction, **every).data
    exact = (exact.metric - exact["corrupted" if direction == "denoise" else "clean"]).values
    errors = []
    for steps in (1, 4, 16, 64):
        found = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=sites, direction=direction, steps=steps)
        together = np.nansum(changes(found), axis=(3, 4))
        if steps == 1:
            assert "completeness" not in found.data, "to find it would cost more than the estimate"
        else:
            assert found.data.completeness.dims == ("prompt", "site", "layer")
            assert np.abs(found.data.completeness.values - (together - exact)).max() < 1e-5
        errors.append(np.abs(together - exact).max() / np.abs(exact).max())
    print(direction, sites, errors)
    assert errors[0] > errors[1] > 10 * errors[2] > 100 * errors[3]
    assert errors[3] < 1e-4


# AtP* on real attention


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("fix", ["qk", ("drop", "qk")])
@pytest.mark.parametrize("name", ["llama", "gpt2"], indirect=True)
def test_queries_and_keys_are_put_in_one_by_one(fix, steps, name, hf_model, model):
    """Each query and key in a plain run of its own, read at z; slopes there from runs that stop one layer each."""
    way = [0.0] if steps == 1 else [1 / 6, 1 / 2, 5 / 6]
    stops = range(LAYERS) if "drop" in fix else [None]

    def estimate(target, donor, site, ids, row):
        z, own, other = f"{site.split('.')[0]}.z", target.values[site], donor.values[site]
        runs = [
            [ByHand(name, hf_model, ids[0], {site: own + part * (other - own)}, stopped) for part in way]
            for stopped in stops
        ]
        slopes_ = [sum(run.slopes(difference(run.logits, row))[z] for run in each) / steps for each in runs]
        found = torch.zeros(own.shape[1], own.shape[0], dtype=torch.float64)
        for head, position in product(*map(range, found.shape)):
            put = own.clone()
            put[position, head] = other[position, head]
            moved = ByHand(name, hf_model, ids[0], {site: put}).values[z] - target.values[z]
            each = torch.stack([(moved.double() * slope.double()).sum() for slope in slopes_])
            found[head, position] = each.abs().sum() / (LAYERS - 1) if "drop" in fix else each[0]
        return found

    expected = by_hand(name, hf_model, model, ["q", "k"], estimate, 4)
    result = rs.attribution_patching(model, CLEAN, CORRUPTED, METRIC, sites=["q", "k"], fix=fix, steps=steps)
    found = np.abs(changes(result)) if "drop" in fix else changes(result)
    agree(found, expected)
    plain = rs.attribution_patching(model, CLEAN, CORRUPTED, METRIC, sites=["q", "k"], steps=steps)
    with pytest.raises(AssertionError):
        agree(changes(plain), expected, close=100 * CLOSE)
    assert result.settings["fix"] == ([fix] if isinstance(fix, str) else list(fix))


def test_a_fix_leaves_other_sites_alone(toy):
    plain, fixed = (
        rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["z", "q"], fix=fix) for fix in (None, "qk")
    )
    z, q = (np.abs(changes(plain)[:, k] - changes(fixed)[:, k]) for k in (0, 1))
    assert np.nanmax(z) == 0
    assert np.nanmax(q) > 1e-4


# SmolLM2


def correlation(exact, estimated):
    one, other = (changes(each).ravel() for each in (exact, estimated))
    kept = ~np.isnan(one)
    return np.corrcoef(one[kept], other[kept])[0, 1]


def test_smollm2_against_exact_patches(smollm2):
    """How good the estimate is on the indirect-object pair, with its corrections."""
    metric = rs.logit_diff(" Mary", " John")
    found = {}
    for sites, some in (("resid_pre", None), ("z", [16, 19, 23]), ("q", [16, 19, 23])):
        layers = "each" if some is None else some
        exact = rs.patch_activations(smollm2, *IOI, metric, sites=sites, layers=layers)
        for fix in (None, "qk") if sites == "q" else (None,):
            estimated = rs.attribution_patching(smollm2, *IOI, metric, sites=sites, layers=layers, fix=fix)
            assert estimated.check.passed
            found[sites, fix] = correlation(exact, estimated)
    print({key: round(float(value), 4) for key, value in found.items()})
    assert found["resid_pre", None] > 0.8
    assert found["z", None] > 0.95
    assert found["q", "qk"] > max(0.95, found["q", None])
