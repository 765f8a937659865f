"""What is read off the stream against what plain forward hooks see on the untouched model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from models.test_trunk import plant
from tiny import LAYERS, PARALLEL, SEQUENTIAL, apart, blocks_of, some_ids, state_of, tokenizer

import resstream as rs
from resstream.errors import PromptError, SiteError
from resstream.models.causal_lm import CausalLM, CausalTrunk
from resstream.sites import Site

CLOSE = 2e-6  # float32, relative to the largest entry; a planted error is 500 times as large
PARIS = "The Eiffel Tower is in the city of"

# Whose outputs are the two writes of a block; Gemma norms them once more, and Granite scales them.
WRITERS = {
    "gpt2": ("attn", "mlp"),
    "llama": ("self_attn", "mlp"),
    "neox_sequential": ("attention", "mlp"),
    "neox_parallel": ("attention", "mlp"),
    "gptj": ("attn", "mlp"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "granite": ("self_attn", "mlp"),
}
ARCHITECTURES = {name: {**SEQUENTIAL, **PARALLEL}[name] for name in WRITERS}
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """What hooks saw in one run of one prompt: the value at every site, "pos d_model", and the logits."""

    values: dict[str, torch.Tensor]
    logits: torch.Tensor


def by_hooks(name: str, hf_model: torch.nn.Module, ids: torch.Tensor, changes: Mapping[str, Change] = {}) -> Seen:
    """Run one prompt through a Hugging Face model whose hooks look at every site, and change some.

    A middle of the stream has no module of its own, so a change there is put on what attention writes.
    """
    values: dict[str, torch.Tensor] = {}
    now: dict[str, torch.Tensor] = {}
    factor = getattr(hf_model.config, "residual_multiplier", 1.0)
    handles = []

    def at(site, value):
        value = changes[site](value) if site in changes else value
        values[site] = value[0]
        return value

    def enter(layer):
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            now["x"] = new = at(f"{layer}.resid_pre", x)
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        return hook

    def write(layer, kind):
        def hook(module, args, output):
            old = output if isinstance(output, torch.Tensor) else output[0]
            old = old * factor
            new = at(f"{layer}.{kind}", old)
            if kind == "attn" and name not in PARALLEL:
                middle = now["x"] + new
                new = new + (at(f"{layer}.resid_mid", middle) - middle)
            new = new / factor
            return None if torch.equal(new, old / factor) else like(output, new)

        return hook

    def leave(layer):
        return lambda module, args, output: like(
            output, at(f"{layer}.resid_post", output if isinstance(output, torch.Tensor) else output[0])
        )

    for layer, block in enumerate(blocks_of(hf_model)):
        handles.append(block.register_forward_pre_hook(enter(layer), with_kwargs=True))
        for kind, path in zip(("attn", "mlp"), WRITERS[name], strict=True):
            handles.append(block.get_submodule(path).register_forward_hook(write(layer, kind)))
        handles.append(block.register_forward_hook(leave(layer)))
    try:
        logits = hf_model(input_ids=ids, use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return Seen(values, logits)


def like(output, new):
    """A new stream in the form of what a module returned."""
    return new if isinstance(output, torch.Tensor) else (new, *output[1:])


def kinds_of(name):
    """The kinds of site that an architecture has."""
    return [
        kind
        for kind in ("resid_pre", "resid_mid", "resid_post", "attn", "mlp")
        if "mid" not in kind or sequential(name)
    ]


def sequential(name):
    """Whether the MLP of an architecture reads what attention wrote."""
    return name not in PARALLEL


@pytest.fixture(scope="module", params=WRITERS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return ARCHITECTURES[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


def every_site_is_its_hook(name, hf_model, model, ids):
    with torch.no_grad():
        seen = by_hooks(name, hf_model, ids)
    stream = rs.read(model, ids, sites=kinds_of(name))
    assert set(stream.sites) == set(seen.values)
    for site, expected in seen.values.items():
        if "resid_p" in site:
            assert torch.equal(stream[site][0], expected), site
        else:
            assert apart(stream[site][0], expected) < CLOSE, site
    assert apart(stream.logits[0], seen.logits) < CLOSE


def test_every_site_is_its_hook(name, hf_model, model):
    every_site_is_its_hook(name, hf_model, model, some_ids(1, 11))


def test_every_site_is_its_hook_on_smollm2(smollm2):
    every_site_is_its_hook("llama", smollm2.hf_model, smollm2, smollm2.tokenize(PARIS).ids)


@pytest.mark.parametrize(
    ("owner", "method", "kind"),
    [
        (CausalTrunk, "write", "attn"),
        (CausalTrunk, "write", "mlp"),
        (CausalTrunk, "layer", None),
        (CausalLM, "readout", None),
    ],
)
def test_a_site_that_is_off_is_noticed(owner, method, kind, name, hf_model, model, monkeypatch):
    """The twin of the test above."""
    plant(monkeypatch, owner, method, kind)
    with pytest.raises(AssertionError):
        every_site_is_its_hook(name, hf_model, model, some_ids(1, 11))


def test_layers_have_one_boundary_more(name, hf_model, model):
    """L + 1 boundaries: what a block leaves is, bit for bit, what the next one finds."""
    stream = rs.read(model, some_ids(2, 7), sites=["resid_pre", "resid_post"])
    with torch.no_grad():
        seen = by_hooks(name, hf_model, some_ids(2, 7)[:1])
    for layer in range(LAYERS - 1):
        assert torch.equal(stream[f"{layer}.resid_post"], stream[f"{layer + 1}.resid_pre"])
    boundaries = {tensor.numpy().tobytes() for tensor in stream.values.values()}
    assert len(boundaries) == LAYERS + 1
    assert torch.equal(stream["embed"], stream["0.resid_pre"])
    assert torch.equal(stream["final"], stream[f"{LAYERS - 1}.resid_post"])
    assert apart(stream["embed"][0], seen.values["0.resid_pre"]) < CLOSE
    assert apart(stream["final"][0], seen.values[f"{LAYERS - 1}.resid_post"]) < CLOSE


def test_the_last_residual_is_read_before_the_final_norm(smollm2):
    """Case 3: hidden_states[-1] of the Hugging Face library is already normed; normed twice, Paris is lost."""
    stream = rs.read(smollm2, PARIS, sites="final")
    with torch.no_grad():
        seen = by_hooks("llama", smollm2.hf_model, stream.tokens.ids)
        normed = smollm2.hf_model.model.norm(seen.values["29.resid_post"])
        last = smollm2.hf_model.lm_head(normed)[-1].softmax(-1)
        twice = smollm2.hf_model.lm_head(smollm2.hf_model.model.norm(normed))[-1].softmax(-1)
    assert torch.equal(stream["final"][0], seen.values["29.resid_post"])
    paris = smollm2.tokenizer(" Paris")["input_ids"][0]
    probability = stream.logits[0, -1].softmax(-1)
    assert probability.argmax() == last.argmax() == paris
    assert float(probability[paris]) == pytest.approx(0.656, abs=5e-4)
    assert float(probability[paris]) == pytest.approx(float(last[paris]), rel=1e-5)
    assert abs(float(twice[paris]) - 0.656) > 0.05


def test_tokens_are_the_tokenizers_own(smollm2):
    """Case 6: nothing is prepended, and what was read is returned."""
    expected = smollm2.tokenizer(PARIS)["input_ids"]
    tokens = rs.read(smollm2, PARIS, sites="embed").tokens
    assert tokens.ids.tolist() == [expected]
    assert tokens.strings == (tuple(smollm2.tokenizer.decode([token]) for token in expected),)
    assert (tokens.lengths, tokens.padded) == ((9,), False)


def test_a_padded_batch_is_its_prompts_alone(name, model):
    prompts = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10", "w11 w12 w13", "w5 w4 w3 w2 w1 w0"]
    batch = rs.read(model, prompts, sites=kinds_of(name))
    assert batch.tokens.padded
    for row, prompt in enumerate(prompts):
        alone = rs.read(model, prompt, sites=kinds_of(name))
        length = alone.tokens.width
        for site in alone.sites:
            assert apart(batch[site][row, :length], alone[site][0]) < CLOSE
            assert not batch[site][row, length:].any(), "and nothing stands beyond a prompt's end"
        assert apart(batch.logits[row, :length], alone.logits[0]) < CLOSE


POSITIONS = {
    "one": (2, lambda row: row[2:3]),
    "last": (-1, lambda row: row[-1:]),
    "several": ([-1, 0], lambda row: torch.cat([row[:1], row[-1:]])),
    "slice": (slice(1, 3), lambda row: row[1:3]),
    "from the end": (slice(-2, None), lambda row: row[-2:]),
}


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_count_within_each_prompt(case):
    positions, cut = POSITIONS[case]
    model = rs.load(ARCHITECTURES["llama"](), tokenizer=tokenizer())
    prompts = ["w1 w2 w3 w4 w5", "w11 w12 w13"]
    stream = rs.read(model, prompts, positions=positions)
    whole = rs.read(model, prompts)
    for row, length in enumerate((5, 3)):
        for site in stream.sites:
            assert torch.equal(stream[site][row], cut(whole[site][row, :length]))
    assert torch.equal(stream.logits, whole.logits)


def test_unequal_numbers_of_positions_end_in_zeros():
    model = rs.load(ARCHITECTURES["llama"](), tokenizer=tokenizer())
    stream = rs.read(model, ["w1 w2 w3 w4 w5", "w11 w12 w13"], sites="final", positions=slice(1, None))
    whole = rs.read(model, ["w1 w2 w3 w4 w5", "w11 w12 w13"], sites="final")
    assert stream["final"].shape[1] == 4
    assert torch.equal(stream["final"][0], whole["final"][0, 1:])
    assert torch.equal(stream["final"][1, :2], whole["final"][1, 1:3])
    assert not stream["final"][1, 2:].any()


def test_what_was_read_is_a_copy(name):
    """Case 19: it shares no storage with the model, and an edit of the weights in place does not reach it."""
    hf_model = ARCHITECTURES[name]()
    model = rs.load(hf_model, name=name)
    for positions in (None, [0, -1]):
        stream = rs.read(model, some_ids(2, 5), sites=["embed", *kinds_of(name)], positions=positions)
        tensors = [*stream.values.values(), stream.logits]
        before = [tensor.clone() for tensor in tensors]
        own = {tensor.untyped_storage().data_ptr() for tensor in [*hf_model.parameters(), *hf_model.buffers()]}
        assert not own & {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        assert not any(tensor.requires_grad for tensor in tensors)
        for parameter in hf_model.parameters():
            parameter.data.mul_(1.5)
        assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))


def test_check_holds_and_names_the_sum(model):
    stream = rs.read(model, some_ids(2, 5), sites=["resid_pre", "attn", "mlp", "resid_post"])
    assert stream.check.passed
    assert stream.check.error < CLOSE
    assert "2 prompts of 5 tokens, 12 sites" in repr(stream)
    assert "(ok)" in repr(stream)


@pytest.mark.parametrize("kind", ["attn", "mlp"])
def test_check_fails_where_a_branch_is_planted_wrong(kind, model, monkeypatch):
    plant(monkeypatch, CausalTrunk, "write", kind)
    check = rs.read(model, some_ids(2, 5), sites=["resid_pre", "attn", "mlp", "resid_post"]).check
    assert not check.passed
    assert check.name == "pre + attn + mlp = post"
    assert check.where.startswith("layer ")


@pytest.mark.parametrize(("owner", "method"), [(CausalTrunk, "layer"), (CausalLM, "readout")])
def test_check_fails_where_the_logits_are_not_the_models(owner, method, model, monkeypatch):
    plant(monkeypatch, owner, method)
    check = rs.read(model, some_ids(2, 5)).check
    assert not check.passed
    assert check.name == "base run = the model's own logits"


def test_check_fails_on_what_is_not_a_number(model, monkeypatch):
    honest = CausalTrunk.write
    monkeypatch.setattr(
        CausalTrunk, "write", lambda self, site, x: honest(self, site, x) * (float("nan") if site.layer == 1 else 1)
    )
    check = rs.read(model, some_ids(2, 5), sites=["resid_pre", "attn", "mlp", "resid_post"]).check
    assert not check.passed
    assert check.where == "layer 1"


# Errors


@contextmanager
def unchecked():
    """Types are not checked at run time, as for users, who then see the library's own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def toy():
    return rs.load(ARCHITECTURES["llama"](), name="toy", tokenizer=tokenizer())


def says(error, *parts):
    """Whether an error's message has all parts: what was asked for, what was found, what to type instead."""
    return [part for part in parts if part not in str(error.value)] == []


def test_a_site_that_was_not_read(toy):
    stream = rs.read(toy, "w1 w2", sites=["0.attn", "final"])
    assert stream["2.resid_post"] is stream["final"]
    assert stream[Site(0, "attn")] is stream["0.attn"]
    with pytest.raises(SiteError) as error:
        stream["1.mlp"]
    assert says(error, 'site "1.mlp" was not read', "'0.attn', '2.resid_post'", 'sites=["1.mlp"]')


ASKED_WRONGLY = {
    "unknown kind": ("0.resid", 'no site "0.resid"', "layer L of 0-2", "did you mean"),
    "unknown layer": ("3.attn", 'no site "3.attn"', "toy has layers 0-2", 'did you mean "2.attn"?'),
    "no kind": ("resid_prae", 'no site "resid_prae"', "toy has", 'did you mean "0.resid_pre"?'),
    "none": ([], "no sites were asked for", "name some", "'embed', 'final'"),
}


@pytest.mark.parametrize("case", ASKED_WRONGLY)
def test_a_site_that_the_model_does_not_have(case, toy):
    asked, *parts = ASKED_WRONGLY[case]
    with pytest.raises(SiteError) as error:
        rs.read(toy, "w1 w2", sites=asked)
    assert says(error, *parts)
    if isinstance(asked, str):
        with pytest.raises(SiteError) as error:
            rs.read(toy, "w1 w2")[asked]
        assert says(error, *parts)


@pytest.mark.parametrize("asked", ["resid_mid", "1.resid_mid"])
def test_a_parallel_stream_has_no_middle(asked):
    """Case 12."""
    model = rs.load(PARALLEL["neox_parallel"](), name="neox")
    with pytest.raises(SiteError) as error:
        rs.read(model, some_ids(1, 4), sites=asked)
    assert says(error, "resid_mid", "in neox attention and MLP read the same input", 'use "', '.resid_post"')


@pytest.mark.parametrize("positions", [3, -4, [0, 3]])
def test_a_position_that_a_prompt_does_not_have(positions, toy):
    with pytest.raises(PromptError) as error:
        rs.read(toy, ["w1 w2 w3 w4", "w1 w2 w3"], positions=positions)
    assert says(
        error,
        f"no position {positions if isinstance(positions, int) else 3}",
        "prompt 1 has 3 tokens ['w1', 'w2', 'w3']",
        "use -3 to 2",
    )


# After every call, also one that raises


class Planted(Exception):
    """Raised midway through a forward pass."""


def test_everything_is_as_it_was(name):
    hf_model = ARCHITECTURES[name]().train()
    model = rs.load(hf_model)
    before = state_of(hf_model)
    rs.read(model, some_ids(2, 5), sites=kinds_of(name))
    assert state_of(hf_model) == before

    def fail(*_):
        raise Planted

    blocks_of(hf_model)[1].register_forward_pre_hook(fail)
    before = state_of(hf_model)
    with pytest.raises(Planted):
        rs.read(model, some_ids(2, 5), sites=kinds_of(name))
    assert state_of(hf_model) == before
