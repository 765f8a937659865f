"""The logit lens against the model's final norm and head, applied by hand to what hooks see at each boundary."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import pytest
import torch
from models.test_trunk import plant
from stream.test_read import ARCHITECTURES, Planted, by_hooks, says, sequential
from tiny import LAYERS, blocks_of, some_ids, state_of, tokenizer

import resstream as rs
from resstream.errors import MetricError, SiteError
from resstream.measure import lens as lens_module
from resstream.models.causal_lm import CausalLM, CausalTrunk

CLOSE = 1e-5  # nats
PROMPTS = ["w1 w2 w3 w4 w2 w6", "w9 w8 w7", "w3 w1 w4 w1 w5"]
SITES = ["embed", "resid_mid", "resid_post"]

# The final norm, and what is done to the logits.
READOUT = {
    "gpt2": ("transformer.ln_f", lambda z: z),
    "llama": ("model.norm", lambda z: z),
    "neox_sequential": ("gpt_neox.final_layer_norm", lambda z: z),
    "neox_parallel": ("gpt_neox.final_layer_norm", lambda z: z),
    "gptj": ("transformer.ln_f", lambda z: z),
    "gemma2": ("model.norm", lambda z: 30 * torch.tanh(z / 30)),
    "granite": ("model.norm", lambda z: z / 3),
}


@pytest.fixture(scope="module", params=READOUT)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    hf_model = ARCHITECTURES[name]()
    if name == "gemma2":
        hf_model.lm_head.weight.data *= 20  # so that the softcap bends what it caps
    return hf_model


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def toy():
    return rs.load(ARCHITECTURES["llama"](), name="toy", tokenizer=tokenizer())


def sites_of(name):
    """Names of the boundaries that are decoded here, one by one."""
    kinds = ("resid_mid", "resid_post") if sequential(name) else ("resid_post",)
    return ["0.resid_pre", *(f"{layer}.{kind}" for kind in kinds for layer in range(LAYERS))]


def log_softmax(logits):
    logits = np.asarray(logits, dtype=np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def by_hand(name, hf_model, ids, sites):
    """Log-probabilities by site and position: norm, head and logit transform on each hooked boundary."""
    norm, transform = READOUT[name]
    with torch.no_grad():
        seen = by_hooks(name, hf_model, ids)
        decoded = [
            transform(hf_model.get_output_embeddings()(attrgetter(norm)(hf_model)(seen.values[site]))) for site in sites
        ]
    return log_softmax(torch.stack(decoded)), log_softmax(seen.logits)


def the_lens_is_right(name, hf_model, model, prompts=PROMPTS, sites=None, targets=None, top_k=5, close=CLOSE):
    sites = sites or sites_of(name)
    lens = rs.logit_lens(model, prompts, sites=sites, targets=targets, top_k=top_k)
    data, worst = lens.data, 0.0
    assert list(data.site.values) == sites
    for row, prompt in enumerate(prompts):
        ids = model.tokenize(prompt).ids
        found = data.isel(prompt=row, position=slice(ids.shape[1]))
        log_probs, last = by_hand(name, hf_model, ids, sites)
        target = last.argmax(-1) if targets is None else np.full(ids.shape[1], ids_of(targets, row))
        assert (found.target.values == target).all()
        picked = np.take_along_axis(log_probs, np.broadcast_to(target[:, None], (len(sites), len(target), 1)), -1)
        expected = {
            "log_prob": picked[..., 0],
            "entropy": -(np.exp(log_probs) * log_probs).sum(-1),
            "kl": (np.exp(last) * (last - log_probs)).sum(-1),
            "loss": -log_probs[:, np.arange(len(target) - 1), ids[0, 1:]],
        }
        for variable, value in expected.items():
            values = found[variable].values[:, : value.shape[1]]
            error = float((np.abs(values - value) / np.maximum(1, np.abs(value))).max())
            worst = max(worst, error)
            assert error < close, variable
        assert np.isnan(found["loss"].values[:, -1]).all()
        same_rank(found["rank"].values, log_probs, picked, close)
        same_top(found, log_probs, top_k, close)
        for variable in ("log_prob", "rank", "entropy", "kl", "loss"):
            assert np.isnan(data[variable].isel(prompt=row, position=slice(ids.shape[1], None))).all()
    assert lens.check.passed
    return worst


def ids_of(targets, row):
    target = targets[row] if isinstance(targets, list) else targets
    return target if isinstance(target, int) else int(target[1:])


def same_rank(found, log_probs, picked, close):
    """One more than there are better tokens; those that are as good to rounding may count or not."""
    assert ((log_probs > picked + close).sum(-1) + 1 <= found).all()
    assert (found <= (log_probs >= picked - close).sum(-1)).all()


def same_top(found, log_probs, top_k, close):
    """The best tokens, in order; their log-probabilities decide, since neighbours may tie to rounding."""
    expected = -np.sort(-log_probs, axis=-1)[..., :top_k]
    assert np.abs(found.top_log_prob.values - expected).max() < close
    own = np.take_along_axis(log_probs, found.top_token.values, -1)
    assert np.abs(own - expected).max() < 2 * close
    assert all(len(set(cell)) == top_k for cell in found.top_token.values.reshape(-1, top_k).tolist())


def test_the_lens_is_norm_and_head_by_hand(name, hf_model, model):
    the_lens_is_right(name, hf_model, model)


@pytest.mark.parametrize("targets", ["w7", 5, ["w1", 2, "w6"]])
def test_targets(targets, name, hf_model, model):
    the_lens_is_right(name, hf_model, model, targets=targets)


@pytest.mark.parametrize(
    ("owner", "method", "kind"),
    [(CausalLM, "readout", None), (CausalTrunk, "layer", None), (CausalTrunk, "write", "attn")],
)
def test_a_lens_that_is_off_is_noticed(owner, method, kind, name, hf_model, model, monkeypatch):
    """The twin of the tests above; only a sequential stream has states that are put together from writes."""
    plant(monkeypatch, owner, method, kind)
    if kind is not None and not sequential(name):
        the_lens_is_right(name, hf_model, model)
        return
    with pytest.raises(AssertionError):
        the_lens_is_right(name, hf_model, model)


@pytest.mark.parametrize("kind", ["attn", "mlp"])
def test_a_write_is_no_state_to_decode(kind, model):
    with pytest.raises(SiteError, match=rf'"0.{kind}" is what a branch adds.*decode "0.resid_post"'):
        rs.logit_lens(model, some_ids(1, 3), sites=f"0.{kind}")


def test_a_frozen_norm_is_noticed(name, hf_model, model):
    """Case 2: the final norm is recomputed on each residual; the last layer's scale gives other numbers."""
    norm, transform = READOUT[name]
    ids = model.tokenize(PROMPTS[0]).ids
    with torch.no_grad():
        seen = by_hooks(name, hf_model, ids)
        last, early = seen.values[f"{LAYERS - 1}.resid_post"], seen.values["0.resid_pre"]
        frozen = attrgetter(norm)(hf_model)(early) * early.std(-1, keepdim=True) / last.std(-1, keepdim=True)
        wrong = log_softmax(transform(hf_model.get_output_embeddings()(frozen)))
    lens = rs.logit_lens(model, PROMPTS[0], sites="embed", targets=5)
    assert np.abs(lens.data.log_prob.values[0, 0] - wrong[:, 5]).max() > 100 * CLOSE


@pytest.mark.parametrize("budget", [1, 4 * 64 * 5])
def test_pieces_change_nothing(budget, name, hf_model, model, monkeypatch):
    monkeypatch.setattr(lens_module, "_PIECE", budget)
    the_lens_is_right(name, hf_model, model)


def test_smollm2(smollm2):
    sites = [f"{layer}.resid_post" for layer in (0, 7, 15, 22, 28, 29)]
    prompts = ["The Eiffel Tower is in the city of", "When Mary and John went to the store, John gave a drink to"]
    worst = the_lens_is_right("llama", smollm2.hf_model, smollm2, prompts, sites, close=2e-5)
    assert worst > 0, "and it is not compared with itself"


def test_the_last_site_is_the_models_logits(smollm2):
    """Identity 1, through the target's log-probability."""
    prompt = "The Eiffel Tower is in the city of"
    ids = smollm2.tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = smollm2.hf_model(input_ids=ids).logits[0].double().log_softmax(-1)
    lens = rs.logit_lens(smollm2, prompt, targets=" Paris")
    paris = smollm2.tokenizer(" Paris")["input_ids"][0]
    last = lens.data.sel(site="29.resid_post").isel(prompt=0)
    assert np.abs(last.log_prob.values - logits[:, paris].numpy()).max() < 1e-5 * logits.abs().max()
    assert np.exp(last.log_prob.values[-1]) == pytest.approx(0.656, abs=5e-4)
    assert np.abs(last.kl.values).max() < 1e-6
    assert last.top_string.values[-1, 0] == " Paris"
    assert last["rank"].values[-1] == 1
    assert lens.headline.startswith("' Paris' at the last token is first from ")
    assert lens.headline.endswith(".resid_post on, and ends at 0.656")
    settled = lens.headline.split("first from ")[1].split(" on,")[0]
    ranks = lens.data["rank"].isel(prompt=0, position=-1)
    settled = list(lens.data.site.values).index(settled)
    assert (ranks[settled:] == 1).all()
    assert ranks[settled - 1] > 1


def test_the_headline_says_where_it_ends(toy):
    lens = rs.logit_lens(toy, PROMPTS[0], targets="w1")
    rank = int(lens.data["rank"].values[0, -1, -1])
    assert rank > 1
    assert lens.headline == f"'w1' at the last token ends at rank {rank}"


def test_two_identical_tokens_keep_both_columns(smollm2):
    """Case 24: " to", " John" and "," twice or more."""
    prompt = "When Mary and John went to the store, John gave a drink to"
    lens = rs.logit_lens(smollm2, prompt, sites=["final", "embed"])
    tokens = list(lens.data.token.values[0])
    assert tokens == [smollm2.tokenizer.decode([token]) for token in smollm2.tokenizer(prompt)["input_ids"]]
    assert tokens.count(" John") == tokens.count(" to") == 2
    assert lens.data.sizes == {"prompt": 1, "site": 2, "position": 14, "top": 5}
    frame = lens.to_dataframe()
    john = frame[(frame.token == " John") & (frame.site == "29.resid_post")]
    assert sorted(set(john.position)) == [3, 9]
    assert len(set(john.log_prob)) == 2
    assert lens._repr_html_().count("29.resid_post") >= 1


def test_labels(toy):
    lens = rs.logit_lens(toy, PROMPTS, sites="final", top_k=2, targets="w5")
    data = lens.data
    assert list(data.length.values) == [6, 3, 5]
    assert [list(row) for row in data.token.values] == [[*p.split(), *[""] * (6 - len(p.split()))] for p in PROMPTS]
    assert data.target_string.values[1].tolist() == ["w5"] * 3 + [""] * 3
    strings = np.vectorize(toy.tokenizer.decode, otypes=[object])(data.top_token.values[0, 0, :, :, None])
    assert (data.top_string.values[0, 0] == strings.reshape(6, 2)).all()
    assert (data.top_string.values[1, 0, 3:] == "").all()
    assert (lens.measure, lens.model, lens.settings) == ("logit_lens", "toy", {"sites": "final", "top_k": 2})


@pytest.mark.parametrize("top_k", [0, 1, 64, 1000])
def test_top_k(top_k, toy):
    lens = rs.logit_lens(toy, PROMPTS[0], sites="final", top_k=top_k)
    kept = min(top_k, 64)
    assert lens.data.sizes["top"] == kept
    if kept == 64:
        assert (np.sort(lens.data.top_token.values, axis=-1) == np.arange(64)).all()
        assert np.exp(lens.data.top_log_prob.values).sum(-1) == pytest.approx(1, abs=CLOSE)


def test_a_row_of_a_batch_equals_the_row_alone(model):
    batch = rs.logit_lens(model, PROMPTS, targets=3)
    for row, prompt in enumerate(PROMPTS):
        alone = rs.logit_lens(model, prompt, targets=3).data.isel(prompt=0)
        found = batch.data.isel(prompt=row, position=slice(alone.sizes["position"]))
        for variable in ("log_prob", "entropy", "kl"):
            assert np.abs(found[variable].values - alone[variable].values).max() < CLOSE


@pytest.mark.parametrize(("owner", "method"), [(CausalLM, "readout"), (CausalTrunk, "layer")])
def test_the_check_notices_a_planted_error(owner, method, model, monkeypatch):
    assert rs.logit_lens(model, PROMPTS).check.passed
    plant(monkeypatch, owner, method)
    check = rs.logit_lens(model, PROMPTS).check
    assert not check.passed
    assert check.name == "base run = the model's own logits"


# Errors


def test_a_target_of_several_tokens(toy):
    with pytest.raises(MetricError) as error:
        rs.logit_lens(toy, PROMPTS, targets="w1 w2")
    assert says(error, "'w1 w2'", "is 2 tokens ['w1', 'w2']", "give an answer of one token")


def test_a_list_of_targets_of_the_wrong_length(toy):
    with pytest.raises(MetricError) as error:
        rs.logit_lens(toy, PROMPTS, targets=["w1", "w2"])
    assert says(error, "2 answers", "for 3 prompts", "one for each prompt")


def test_a_site_that_the_model_does_not_have(toy):
    with pytest.raises(SiteError) as error:
        rs.logit_lens(toy, PROMPTS, sites="7.resid_post")
    assert says(error, 'no site "7.resid_post"', "toy has layers 0-2", 'did you mean "2.resid_post"?')


def test_a_negative_top_k(toy):
    with pytest.raises(MetricError) as error:
        rs.logit_lens(toy, PROMPTS, top_k=-1)
    assert says(error, "top_k=-1", "is not a number of tokens", "give 0, or as many")


def test_the_model_is_as_it_was(name):
    hf_model = ARCHITECTURES[name]().train()
    model = rs.load(hf_model, tokenizer=tokenizer())
    before = state_of(hf_model)
    rs.logit_lens(model, PROMPTS, sites=[site for site in SITES if sequential(name) or site != "resid_mid"])
    assert state_of(hf_model) == before

    def fail(*_):
        raise Planted

    blocks_of(hf_model)[1].register_forward_pre_hook(fail)
    before = state_of(hf_model)
    with pytest.raises(Planted):
        rs.logit_lens(model, PROMPTS)
    assert state_of(hf_model) == before


def test_token_ids_without_a_tokenizer():
    model = rs.load(ARCHITECTURES["llama"](), name="mute")
    ids = some_ids(1, 4)
    lens = rs.logit_lens(model, ids, targets=5, sites="final")
    assert lens.data.token.values[0].tolist() == [str(int(token)) for token in ids[0]]
