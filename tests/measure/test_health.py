"""Stream health against plain hooks, numpy and hand loops; and verdicts on nets with exactly one fault each."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from measure.faulty_nets import FAULTY, IDS, Net, activated_trunk, healthy, large_branches, low_precision, stack
from tiny import PARALLEL, SUPPORTED, apart, blocks_of, hooked, some_ids, state_of, tokenizer
from torch.nn.functional import cross_entropy

import resstream as rs
from resstream.errors import EditError, MetricError, SiteError, UnsupportedModelError
from resstream.measure.vitals import layer_worth, precision_drift, stream_statistics, token_matrix
from resstream.measure.vitals.trunk_carry import kind_of, without_rounding
from resstream.models.carry import UNCHANGED, Carry
from resstream.stream import slopes, walk

ARCHITECTURES = ["llama", "gpt2", "gemma2", "neox_parallel"]
each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
CLOSE = 2e-5  # float32, relative; a planted error is fifty times as large
TOKENS = some_ids(2, 9, seed=3)


def loaded(name, **changes):
    return rs.load(SUPPORTED[name](**changes), name=name)


def close(found, expected, within=CLOSE):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= within * np.abs(expected).max()


def boundaries(model, values):
    """A variable at the states between layers."""
    names = [f"{layer}.resid_pre" for layer in range(model.n_layers)] + [f"{model.n_layers - 1}.resid_post"]
    return values.sel(site=names).values


def streams(hf_model, ids):
    """What plain hooks see between layers: "boundary prompt pos d_model"."""
    seen = hooked(hf_model, ids)
    return torch.stack([*seen.inputs, seen.outputs[-1]]).double().numpy()


# Sizes, ranks and outliers


def sizes_are_those_of_plain_hooks(model):
    data = rs.stream_health(model, TOKENS, gradients=False, precision=()).data
    x = streams(model.hf_model, TOKENS)
    some = x[:, :, 1:-1]
    close(boundaries(model, data.norm), np.median(np.linalg.norm(some, axis=-1), axis=-1).T)
    close(boundaries(model, data.first_norm), np.linalg.norm(x[:, :, 0], axis=-1).T)
    close(boundaries(model, data.variance), np.median(some.var(-1), axis=-1).T)
    size = np.abs(x).max(2)
    close(boundaries(model, data.outlier_size), np.sort(size, -1)[..., :-4:-1].swapaxes(0, 1))
    assert (boundaries(model, data.outlier_dimension) == np.argsort(-size, -1)[..., :3].swapaxes(0, 1)).all()
    middle = np.sort(np.abs(x).reshape(*x.shape[:2], -1), -1)[..., (x[0, 0].size - 1) // 2]
    close(boundaries(model, data.outlier_times), (np.sort(size, -1)[..., :-4:-1] / middle[..., None]).swapaxes(0, 1))


@each_architecture
def test_sizes(name, monkeypatch):
    model = loaded(name)
    sizes_are_those_of_plain_hooks(model)
    honest = walk.walk
    monkeypatch.setattr(
        stream_statistics,
        "walk",
        lambda *args, **options: (replace(each, x=1.001 * each.x) for each in honest(*args, **options)),
    )
    with pytest.raises(AssertionError):
        sizes_are_those_of_plain_hooks(model)


@each_architecture
def test_writes_are_compared_with_the_stream_that_they_are_added_to(name):
    model = loaded(name)
    result = rs.stream_health(model, TOKENS, gradients=False, precision=())
    stream = rs.read(model, TOKENS, sites=["resid_pre", "attn", "mlp", *([] if name in PARALLEL else ["resid_mid"])])
    for site in map(model.site, model.writes):
        below = "resid_pre" if site.kind == "attn" or name in PARALLEL else "resid_mid"
        x, write = (stream[f"{site.layer}.{kind}"].double().numpy()[:, 1:-1] for kind in (below, site.kind))
        sizes = np.linalg.norm(write, axis=-1) / np.linalg.norm(x, axis=-1)
        cosines = (write * x).sum(-1) / np.linalg.norm(write, axis=-1) / np.linalg.norm(x, axis=-1)
        own = result.data.sel(write=str(site))
        close(own.ratio, np.median(sizes, axis=1))
        close(own.cosine, np.median(cosines, axis=1), 1e-4)
        close(own.one_sided, np.median(np.abs(write.sum(-1)) / np.abs(write).sum(-1), axis=1), 1e-4)


MATRICES = {
    "random": torch.randn(7, 12, generator=torch.Generator().manual_seed(0)),
    "tall": torch.randn(20, 5, generator=torch.Generator().manual_seed(1)),
    "of rank one": torch.arange(1.0, 5)[:, None] * torch.ones(6),
    "huge": 1e30 * torch.randn(4, 4, generator=torch.Generator().manual_seed(2)),
}


def ranks_are_those_of_numpy(x):
    wide = x.double().numpy()
    values = np.linalg.svd(wide, compute_uv=False)
    shares = values / values.sum()
    expected = np.exp(-sum(share * np.log(share) for share in shares if share > 1e-15))
    assert token_matrix.effective_rank(x) == pytest.approx(expected, rel=1e-5)
    mean = wide.sum(0) / len(wide)
    left = np.sqrt(sum(((row - mean) ** 2).sum() for row in wide) / (wide**2).sum())
    assert token_matrix.rank_residual(x) == pytest.approx(left, rel=1e-9)
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in combinations(wide, 2)]
    assert token_matrix.token_cosine(x) == pytest.approx(np.mean(cosines), abs=1e-9)


@pytest.mark.parametrize("case", MATRICES)
def test_ranks(case, monkeypatch):
    ranks_are_those_of_numpy(MATRICES[case])
    honest = token_matrix._scaled
    monkeypatch.setattr(token_matrix, "_scaled", lambda x: honest(x) + 0.1 * torch.eye(*x.shape))
    with pytest.raises(AssertionError):
        ranks_are_those_of_numpy(MATRICES[case])


def test_one_token_has_no_others_to_be_compared_with():
    alone = torch.ones(1, 4)
    found = (token_matrix.effective_rank(alone), token_matrix.rank_residual(alone), token_matrix.token_cosine(alone))
    assert np.isnan(found).all()


# Gradient


def gradient_is_that_of_plain_hooks(model):
    with torch.no_grad():
        data = rs.stream_health(model, TOKENS, precision=()).data
    blocks, seen = blocks_of(model.hf_model), []
    for row in TOKENS:
        kept = []

        def keep(_, args, kwargs, kept=kept):
            kept.append(args[0] if args else kwargs["hidden_states"])

        def leave(_, __, output, kept=kept):
            kept.append(output if isinstance(output, torch.Tensor) else output[0])

        handles = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
        handles.append(blocks[-1].register_forward_hook(leave))
        logits = model.hf_model(input_ids=row[None], use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        gradients = torch.autograd.grad(cross_entropy(logits[:-1], row[1:]), kept)
        seen.append([float(each.norm()) for each in gradients])
    close(boundaries(model, data.gradient_norm), seen, 1e-4)


@each_architecture
def test_gradient(name, monkeypatch):
    model = loaded(name)
    gradient_is_that_of_plain_hooks(model)
    honest = slopes.pull_through
    monkeypatch.setattr(slopes, "pull_through", lambda *args: [1.001 * each for each in honest(*args)])
    with pytest.raises(AssertionError):
        gradient_is_that_of_plain_hooks(model)


def test_without_gradients_it_says_so():
    result = rs.stream_health(loaded("llama"), TOKENS, gradients=False, precision=())
    assert result.data.gradient_norm.isnull().all()
    assert result.settings["missing"]["gradient_norm"] == "gradients=False"


# Attention


def attention_is_what_the_model_says(model):
    data = rs.stream_health(model, TOKENS, gradients=False, precision=()).data
    with torch.no_grad():
        patterns = model.hf_model(input_ids=TOKENS, output_attentions=True, use_cache=False).attentions
    for layer, pattern in enumerate(patterns):
        for prompt in range(2):
            for head in range(model.n_heads):
                rows = pattern[prompt, head].double().numpy()
                entropies = [
                    -sum(share * np.log(share) for share in row if share > 0) / np.log(query + 1)
                    for query, row in enumerate(rows)
                    if query
                ]
                own = data.isel(prompt=prompt, layer=layer, head=head)
                assert float(own.entropy) == pytest.approx(np.mean(entropies), rel=1e-4)
                assert float(own.first_share) == pytest.approx(rows[1:, 0].mean(), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox_parallel"])
def test_attention(name, monkeypatch):
    model = rs.load(SUPPORTED[name](attn_implementation="eager"), name=name)
    attention_is_what_the_model_says(model)
    honest = walk.walk
    monkeypatch.setattr(
        stream_statistics,
        "walk",
        lambda *args, **options: (
            replace(each, pattern=None if each.pattern is None else each.pattern**1.01)
            for each in honest(*args, **options)
        ),
    )
    with pytest.raises(AssertionError):
        attention_is_what_the_model_says(model)


def test_attention_that_looks_ahead_is_held_against_all_keys():
    pattern = torch.full((1, 1, 4, 4), 0.25)
    tokens = loaded("llama").tokenize(torch.tensor([[1, 2, 3, 4]]))
    figures = stream_statistics.attention_figures(pattern, tokens, 1)
    assert figures["entropy"] == [[pytest.approx(1.0)]]
    assert figures["first_share"] == [[pytest.approx(0.25)]]


def test_where_patterns_cannot_be_told_apart_it_says_so():
    result = rs.stream_health(large_branches(), IDS, precision=())
    assert result.data.entropy.isnull().all()
    assert "nothing to be told apart" in result.settings["missing"]["entropy"]
    assert "not measured" in result.data.evidence.sel(pitfall="entropy collapse").item()


# Precision


def drift_is_that_of_a_hand_loop(model, name, dtype):
    data = rs.stream_health(model, TOKENS, gradients=False, precision=name).data.sel(precision=name)
    kinds = ["resid_pre", "attn", "mlp"]
    stream = rs.read(model, TOKENS, sites=kinds)
    with torch.no_grad():
        low = streams(copy.deepcopy(model.hf_model).to(dtype), TOKENS)
    full = streams(model.hf_model, TOKENS)
    for prompt in range(2):
        x = stream["0.resid_pre"][prompt].to(dtype)
        trunk = [x]
        for layer in range(model.n_layers):
            parts = [stream[f"{layer}.{kind}"][prompt].to(dtype) for kind in ("attn", "mlp")]
            x = x + (parts[0] + parts[1]) if model.layout == "parallel" else (x + parts[0]) + parts[1]
            trunk.append(x)
        for found, expected in (
            (boundaries(model, data.trunk_drift)[prompt], [each.double().numpy() for each in trunk]),
            (boundaries(model, data.model_drift)[prompt], low[:, prompt]),
        ):
            distances = [
                np.linalg.norm((own - exact)[1:-1]) / np.linalg.norm(exact[1:-1])
                for own, exact in zip(expected, full[:, prompt], strict=True)
            ]
            close(found, distances, 0.01)
            assert min(distances) > 1e-5


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_drift(name, precision, dtype, monkeypatch):
    model = loaded(name)
    drift_is_that_of_a_hand_loop(model, precision, dtype)
    honest = precision_drift.relative_error
    monkeypatch.setattr(precision_drift, "relative_error", lambda a, b: 1.05 * honest(a, b))
    with pytest.raises(AssertionError):
        drift_is_that_of_a_hand_loop(model, precision, dtype)


def test_a_trunk_in_full_precision_has_not_drifted():
    data = rs.stream_health(loaded("llama"), TOKENS, gradients=False, precision=()).data
    assert float(data.own_drift.max()) < 1e-6
    assert data.sizes["precision"] == 0


def test_a_rounded_trunk_is_as_far_off_as_its_writes_added_in_float64_say():
    net = Net(stack(), Carry(after=lambda x: x.bfloat16().float()))
    found = rs.stream_health(net, IDS, gradients=False).data.own_drift.isel(site=-1).values
    tokens = net.tokenize(IDS)
    trunk = net.trunk(tokens)
    x, exact = trunk.x0, trunk.x0.double()
    for (site,) in net.steps:
        written = trunk.write(site, x)
        exact, x = exact + written.double(), (x + written).bfloat16().float()
    off = [float((a - b)[1:-1].norm() / b[1:-1].norm()) for a, b in zip(x.double(), exact, strict=True)]
    close(found, off, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_measured_in_float32(dtype):
    hf_model = SUPPORTED["llama"]().to(dtype)
    before = state_of(hf_model)
    half, full = rs.load(hf_model, name="llama"), rs.load(copy.deepcopy(hf_model).float(), name="llama")
    name = str(dtype).removeprefix("torch.")
    found = rs.stream_health(half, TOKENS, precision=())
    expected = rs.stream_health(full, TOKENS, precision=name)
    assert found.settings["dtype"] == name
    assert found.data.precision.values.tolist() == [name]
    for each in ("norm", "gradient_norm", "entropy", "effect", "trunk_drift"):
        close(found.data[each], expected.data[each], 1e-3)
    assert state_of(hf_model) == before
    evidence = found.data.evidence.sel(pitfall="low-precision trunk").item()
    assert f"{float(found.data.trunk_drift.isel(site=-1).median()):.2g} of its size ({name}" in evidence


def test_a_half_precision_model_without_a_copy_is_no_reference():
    net = Net([(None, lambda x: 0.1 * x.roll(1, -1))] * 4, dtype=torch.bfloat16)
    result = rs.stream_health(net, IDS, gradients=False)
    assert result.data.trunk_drift.isnull().all()
    assert result.data.model_drift.isnull().all()
    assert "makes no copy of itself" in result.settings["missing"]["trunk_drift"]
    assert 1e-4 < float(result.data.own_drift.isel(site=-1).mean()) < 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "gemma2"])
def test_a_copy_in_another_type_is_the_model_loaded_in_it(name, tmp_path):
    hf_model = SUPPORTED[name]()
    before = state_of(hf_model)
    found = rs.load(hf_model, name=name).in_dtype(torch.bfloat16)
    assert state_of(hf_model) == before
    hf_model.save_pretrained(tmp_path)
    again = type(hf_model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert {weight.dtype for weight in found.hf_model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(found.own_logits(found.tokenize(TOKENS)), again(input_ids=TOKENS, use_cache=False).logits)
    tied = hf_model.get_input_embeddings().weight is hf_model.get_output_embeddings().weight
    assert (found.hf_model.get_input_embeddings().weight is found.hf_model.get_output_embeddings().weight) == tied


# What layers are worth


def worth_is_that_of_the_naive_loop(model):
    data = rs.stream_health(model, TOKENS, gradients=False, precision=()).data

    def losses():
        with torch.no_grad():
            logits = model.hf_model(input_ids=TOKENS, use_cache=False).logits
        return cross_entropy(logits[:, :-1].transpose(1, 2), TOKENS[:, 1:], reduction="none").double().numpy()

    base = losses()
    close(data.loss, base.mean(1))
    for layer, block in enumerate(blocks_of(model.hf_model)):

        def leave_out(_, args, kwargs, output):
            x = args[0] if args else kwargs["hidden_states"]
            return x if isinstance(output, torch.Tensor) else (x, *output[1:])

        handle = block.register_forward_hook(leave_out, with_kwargs=True)
        change = losses() - base
        handle.remove()
        assert data.effect.values[:, layer] == pytest.approx(change.mean(1), abs=2e-6)
        # As many stretches as tokens, so that the error is that of the mean of single tokens.
        assert float(data.effect_error[layer]) == pytest.approx(change.std(ddof=1) / np.sqrt(change.size), rel=1e-4)


@each_architecture
def test_what_layers_are_worth(name, monkeypatch):
    model = loaded(name)
    worth_is_that_of_the_naive_loop(model)
    honest = layer_worth.score_all
    monkeypatch.setattr(layer_worth, "score_all", lambda scores, base: 1.001 * honest(scores, base))
    with pytest.raises(AssertionError):
        worth_is_that_of_the_naive_loop(model)


# Verdicts


def found_in(result):
    return result.data.pitfall.values[result.data.found.values].tolist()


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_is_named_and_no_other(fault):
    result = rs.stream_health(FAULTY[fault](), IDS)
    assert found_in(result) == [fault]
    assert result.headline.startswith(f"found: {fault}")
    assert result.check.passed


def test_nothing_is_found_in_a_healthy_net():
    result = rs.stream_health(healthy(), IDS)
    assert found_in(result) == []
    assert result.headline == f"none of {len(FAULTY)} pitfalls"
    assert result.data.pitfall.values.tolist() == [*FAULTY]


def test_the_evidence_names_the_place():
    polluted = rs.stream_health(FAULTY["a polluting layer"](), IDS).data.sel(pitfall="a polluting layer")
    assert polluted.evidence.item().startswith("layer 7 (without it -")
    misfit = rs.stream_health(FAULTY["shape mismatch"](), IDS).data.sel(pitfall="shape mismatch")
    assert "3.mlp [2, 40, 1]" in misfit.evidence.item()


def test_an_activation_on_the_trunk_is_named_too():
    result = rs.stream_health(activated_trunk(), IDS)
    assert found_in(result) == ["activate-then-add"]
    assert "an activation on the trunk" in result.data.evidence.sel(pitfall="activate-then-add").item()
    assert result.settings["trunk"] == "trunk factors carried at 24 of 24 steps"


def test_a_stream_that_overflows_has_branches_that_are_too_large():
    branch = rs.lab.Perceptron(32, "relu", (1.0, 100.0))
    net = rs.lab.mlp("residual", depth=24, width=16, branch=branch, dtype=torch.float32)
    result = rs.stream_health(net, IDS[:1, :4], precision=())
    assert found_in(result) == ["large branches at init"]
    assert "the stream overflows at" in result.headline
    assert not result.check.passed


def test_a_prompt_that_repeats_a_word_is_no_collapse():
    assert found_in(rs.stream_health(healthy(), torch.full((1, 40), 5))) == []


def test_too_few_tokens_tell_nothing_from_chance():
    result = rs.stream_health(FAULTY["a polluting layer"](), IDS[:1, :5])
    assert "too few tokens" in result.data.evidence.sel(pitfall="a polluting layer").item()
    assert "a polluting layer" not in found_in(result)


LAB = {
    "large branches at init": lambda lab: lab.transformer("residual", layers=12),
    "Post-LN without warm-up": lambda lab: lab.transformer("post_ln", layers=24, attention=lab.Attention(causal=False)),
    "rank collapse": lambda lab: lab.transformer("plain", layers=12),
    "entropy collapse": lambda lab: lab.transformer("pre_ln", layers=12, attention=lab.Attention(sharpness=100.0)),
    "depth dilution": lambda lab: faded(lab.transformer("pre_ln", layers=12)),
    "low-precision trunk": lambda lab: lab.transformer("pre_ln", layers=56, width=16, dtype=torch.bfloat16),
    "activate-then-add": lambda lab: lab.transformer("trunk_activation", layers=12),
}
LAB_IDS = torch.randint(100, (4, 24), generator=torch.Generator().manual_seed(0))


def faded(net):
    """Branches that write ever less."""
    last = ("o", "out")
    return net.with_weights(
        {
            name: value * 0.5 ** int(name.split(".")[0]) if name.rpartition(".")[2] in last else value
            for name, value in net.weights.items()
        }
    )


@pytest.mark.parametrize("fault", LAB)
def test_a_fault_of_a_net_of_the_lab_is_named_and_no_other(fault):
    assert found_in(rs.stream_health(LAB[fault](rs.lab), LAB_IDS)) == [fault]


SOUND = ["pre_ln", "sandwich_ln", "deep_norm", "re_zero", "skip_init", "layer_scale", "fixup", "gpt2_scaling"]


@pytest.mark.parametrize("rule", SOUND)
def test_nothing_is_found_in_sound_nets_of_the_lab(rule):
    assert found_in(rs.stream_health(rs.lab.transformer(rule, layers=12), LAB_IDS, precision=())) == []


def test_a_layer_of_noise_in_a_trained_net_of_the_lab_is_the_polluting_one():
    task = rs.lab.rings(60)
    net = rs.lab.train(rs.lab.mlp("pre_ln", depth=6, ends=task.ends), task, steps=150, rate=1e-2).net
    assert found_in(rs.stream_health(net, task.answered)) == []
    rng = torch.Generator().manual_seed(0)
    noisy = {
        name: 2 * torch.randn(value.shape, generator=rng, dtype=value.dtype) if name == "4.mlp.out" else value
        for name, value in net.weights.items()
    }
    result = rs.stream_health(net.with_weights(noisy), task.answered)
    assert found_in(result) == ["a polluting layer"]
    assert result.data.evidence.sel(pitfall="a polluting layer").item().startswith("layer 4 ")


CARRIES = {
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "activation": torch.tanh,
    "rounding": lambda x: x.half().to(x),
    "factor": lambda x: 0.5 * x,
    "other": lambda x: torch.sigmoid(x @ torch.ones(8, 8)) * x,
}


@pytest.mark.parametrize("kind", CARRIES)
def test_what_a_trunk_does_is_told_apart_by_numbers(kind):
    x = torch.zeros(2, 3, 8)
    assert kind_of(CARRIES[kind], x) == kind
    kept = without_rounding(Carry(before=CARRIES[kind], after=CARRIES["rounding"]), x)
    assert (kept == UNCHANGED) == (kind == "rounding")


def test_more_activations_norms_and_a_skip_that_passes_nothing():
    x = torch.zeros(1, 2, 8)
    slope = torch.rand(8, generator=torch.Generator().manual_seed(0))
    for activation in (torch.relu, torch.nn.functional.gelu, lambda x: torch.where(x > 0, x, slope * x)):
        assert kind_of(activation, x) == "activation"
    assert kind_of(lambda x: torch.nn.functional.rms_norm(x, (8,), eps=1e-5), x) == "norm"
    assert kind_of(lambda x: 0 * x, x) == "factor"


# The whole


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox_parallel"])
def test_a_prompt_among_longer_ones_is_that_prompt_alone(name):
    model = rs.load(SUPPORTED[name](), name=name, tokenizer=tokenizer())
    short, long = "w1 w5 w9 w2 w7", "w3 w4 w8 w8 w1 w0 w30 w12 w6"
    both, alone = (rs.stream_health(model, prompts).data for prompts in ([short, long], [short]))
    for variable in alone.data_vars:
        if "prompt" in alone[variable].dims and variable != "outlier_dimension":
            assert np.allclose(both[variable].isel(prompt=0), alone[variable].isel(prompt=0), rtol=1e-3, atol=1e-6), (
                variable
            )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_model_is_left_as_it_was(name, monkeypatch):
    hf_model = SUPPORTED[name]().train()
    handle = hf_model.register_forward_hook(lambda *_: None)
    model = rs.load(hf_model, name=name)
    before = state_of(hf_model)
    rs.stream_health(model, TOKENS, precision=("bfloat16", "float16"))
    assert state_of(hf_model) == before

    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("resstream.measure.health.layer_worth", fail)
    with pytest.raises(ZeroDivisionError):
        rs.stream_health(model, TOKENS)
    assert state_of(hf_model) == before
    handle.remove()


def test_the_check_fails_where_the_sum_is_not_the_model(monkeypatch):
    model = loaded("gpt2")
    assert rs.stream_health(model, TOKENS, gradients=False, precision=()).check.passed
    own = model.own_logits(model.tokenize(TOKENS))
    monkeypatch.setattr(type(model), "own_last_logits", lambda self, tokens: 1.001 * own[:, -1])
    assert not rs.stream_health(model, TOKENS, gradients=False, precision=()).check.passed


def test_what_cannot_be_asked_is_refused():
    model = loaded("llama")
    with pytest.raises(SiteError, match=r'precision="int8" is not known; choose from .*bfloat16'):
        rs.stream_health(model, TOKENS, precision="int8")
    with pytest.raises(MetricError, match="one token"):
        rs.stream_health(model, TOKENS[:, :1])
    with rs.edited(model, rs.Zero("0.mlp")) as edited, pytest.raises(EditError, match="stream_health takes"):
        rs.stream_health(edited, TOKENS)
    with pytest.raises(UnsupportedModelError, match="makes no copy of itself"):
        healthy().in_dtype(torch.bfloat16)


def test_a_write_that_cannot_be_added_is_refused():
    branches = stack()
    branches[1] = branches[1][0], lambda x: x.unsqueeze(0).expand(3, -1, -1, -1)
    with pytest.raises(UnsupportedModelError, match=r'"1.mlp" of net writes \[3, 2, 40, 64\] to a stream of'):
        rs.stream_health(Net(branches), IDS)


def test_it_is_kept_in_a_file(tmp_path):
    result = rs.stream_health(low_precision(), IDS[:, :8], precision=("bfloat16", "float16"))
    again = rs.open_result(result.save(tmp_path / "health"))
    assert again.data.identical(result.data)
    assert (again.headline, again.settings, again.check) == (result.headline, result.settings, result.check)


def test_smollm2_is_healthy_and_has_a_sink(smollm2):
    text = "The old harbour had been quiet for years before the ferries came back."
    result = rs.stream_health(smollm2, text, precision=())
    assert found_in(result) == []
    assert result.check.passed
    assert "position 0 is a sink" in result.headline
    assert "outliers in dimension" in result.headline
    sink = result.data.isel(prompt=0).sel(site="15.resid_pre")
    assert float(sink.first_norm) > 50 * float(sink.norm)
    assert apart(torch.tensor(float(sink.outlier_size[0])), torch.tensor(float(sink.first_norm))) < 0.05
