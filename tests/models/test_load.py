"""What load() opens, what it refuses and how it says so, and the certificate that spares a second proof."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tiny import REFUSED, SUPPORTED, apart, hooked, some_ids, state_of, tokenizer
from torch import nn

from resstream.check import Check
from resstream.errors import LoadError, UnsupportedModelError
from resstream.models import bundled, causal_lm, load
from resstream.models.bridge import BridgeLM
from resstream.models.causal_lm import CausalLM
from resstream.models.certificate import Certificate, keep, recall

CLOSE = 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tiny Llama and its tokenizer; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("hub") / "tiny-llama"
    SUPPORTED["llama"]().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture
def proofs(monkeypatch):
    """Every call to verify, noted."""
    noted, honest = [], CausalLM.verify

    def verify(self):
        noted.append(self.name)
        return honest(self)

    monkeypatch.setattr(CausalLM, "verify", verify)
    return noted


def bridge_of(hf_model, *, compatible=False):
    """The model inside a TransformerBridge; with compatibility mode its weights are folded and centred."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    bridge = build_bridge_from_module(hf_model, type(hf_model).__name__, hf_config=hf_model.config)
    if compatible:
        bridge.enable_compatibility_mode()
    with torch.no_grad():
        bridge(some_ids(1, 2))  # a bridge's own first run adds hooks to its norms
    return bridge


# Hugging Face models


def test_a_model_is_used_as_it_is():
    hf_model = SUPPORTED["llama"]()
    model = load(hf_model)
    assert model.hf_model is hf_model
    assert (model.name, model.tokenizer) == ("LlamaForCausalLM", None)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert load(model) is model


def test_a_model_with_a_tokenizer_reads_text():
    hf_model, own = SUPPORTED["llama"](), tokenizer()
    model = load(hf_model, tokenizer=own, name="toy")
    assert (model.tokenizer, model.name) == (own, "toy")
    with torch.no_grad():
        assert apart(model.logits("w3 w1 w4"), hf_model(torch.tensor([[3, 1, 4]])).logits) < CLOSE


def test_a_model_is_never_moved_or_cast():
    hf_model = SUPPORTED["gpt2"]()
    before = state_of(hf_model)
    model = load(hf_model, dtype=torch.bfloat16)
    assert model.dtype == torch.float32
    assert state_of(hf_model) == before


def test_the_streams_type_is_not_that_of_packed_weights():
    hf_model = SUPPORTED["llama"]()
    hf_model.register_parameter("packed", nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    assert next(hf_model.parameters()).dtype == torch.uint8
    model = load(hf_model)
    assert model.dtype == torch.float32
    assert model.readout(torch.zeros(1, 32)).dtype == torch.float32


def test_a_part_that_is_offloaded_is_an_error():
    hf_model = SUPPORTED["llama"]()
    hf_model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"'lm_head\.weight' are on the meta device"):
        load(hf_model)


def test_a_wrapped_model_is_an_error():
    hf_model = SUPPORTED["llama"]()
    with pytest.raises(UnsupportedModelError, match="nothing is known about where a OptimizedModule keeps its blocks"):
        load(torch.compile(hf_model, backend="eager"))


def test_a_model_compiled_in_place_is_run_as_it_was_written():
    hf_model, ids = SUPPORTED["gpt2"](), some_ids(2, 9)
    expected, compiled = hooked(hf_model, ids), []
    for module in (hf_model, hf_model.transformer.h[1], hf_model.transformer.h[1].mlp):
        module.compile(backend=lambda graph, _: compiled.append(graph) or graph)
    impl = hf_model._compiled_call_impl
    with torch.no_grad():
        model = load(hf_model)
        trunk = model.trunk(model.tokenize(ids))
        assert apart(model.logits(ids), expected.logits) < CLOSE
        assert torch.equal(trunk.layer(1, expected.inputs[1]), expected.outputs[1])
        assert apart(trunk.layer(1, expected.inputs[1] * 2), expected.outputs[1]) > 0.1, (
            "a block reads what it is given"
        )
        assert compiled == []
        assert hf_model._compiled_call_impl is impl
        hf_model.transformer.h[1].mlp(expected.inputs[1])
        assert len(compiled) == 1, "and the user's own calls are compiled as before"


# Refusals


@pytest.mark.parametrize("name", ["opt_post_ln", "gpt1", "bert"])
def test_a_trunk_that_is_no_sum_is_refused_with_layer_and_error(name):
    with pytest.raises(UnsupportedModelError, match=r"not a residual sum.*: at layer \d .* is off by \d") as caught:
        load(REFUSED[name](), name=name)
    assert str(caught.value).startswith(name)
    assert 'load a Pre-LN model such as "smollm2"' in str(caught.value)


def test_the_model_that_differs_by_its_norms_place_is_opened():
    """The twin of the test above: it is the numbers that are refused, not a name."""
    assert type(REFUSED["opt_post_ln"]()) is type(SUPPORTED["opt"]())
    assert load(SUPPORTED["opt"]()).check.passed


def test_a_third_branch_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"found .*mamba.*; load a model without mamba"):
        load(REFUSED["falcon_h1"]())


def test_models_without_a_language_head_are_refused():
    with pytest.raises(UnsupportedModelError, match="where a LlamaModel keeps its blocks"):
        load(SUPPORTED["llama"]().model)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    encoder_decoder = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes))
    with pytest.raises(UnsupportedModelError, match="each block must add one attention and one MLP write"):
        load(encoder_decoder)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_is_left_as_it_was(name):
    hf_model = REFUSED[name]().train()
    before = state_of(hf_model)
    with pytest.raises(UnsupportedModelError):
        load(hf_model)
    assert state_of(hf_model) == before


@pytest.mark.parametrize("source", [3, None, nn.Linear(2, 2), ["gpt2"]])
def test_what_is_no_model_is_an_error(source):
    with pytest.raises(LoadError, match=f'cannot load a {type(source).__name__}: .* try rs.load\\("smollm2"\\)'):
        load(source)


# Folders and files


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_read_with_its_tokenizer(kind, saved):
    rng = torch.get_rng_state()
    model = load(kind(saved))
    assert torch.equal(torch.get_rng_state(), rng)
    assert (model.name, model.dtype) == ("tiny-llama", torch.float32)
    with torch.no_grad():
        expected = hooked(SUPPORTED["llama"](), torch.tensor([[3, 1, 4]])).logits
        assert apart(model.logits("w3 w1 w4"), expected) < CLOSE


def test_a_folder_in_the_working_directory_is_read_by_its_bare_name(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    assert load(saved.name).check.passed
    assert load(f"./{saved.name}/").name == saved.name


def test_a_folders_type_name_and_tokenizer_can_be_chosen(saved):
    own = tokenizer()
    model = load(saved, dtype=torch.bfloat16, name="half", tokenizer=own)
    assert (model.dtype, model.name, model.tokenizer) == (torch.bfloat16, "half", own)


def test_a_folders_own_type_is_kept(tmp_path):
    SUPPORTED["gpt2"]().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path, tokenizer=tokenizer()).dtype == torch.bfloat16


def test_no_accelerator_is_picked_by_default(saved, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert load(saved).device == torch.device("cpu")


def test_a_missing_folder_is_an_error_that_says_what_lies_there(tmp_path):
    (tmp_path / "smol").mkdir()
    with pytest.raises(LoadError, match=r'no model at ".*smoll": the folder ".*" holds \[\'smol\'\]; give a folder'):
        load(tmp_path / "smoll")
    with pytest.raises(LoadError, match=r'there is no folder ".*nowhere" with anything in it'):
        load(str(tmp_path / "nowhere" / "model"))


def test_a_missing_gguf_file_is_an_error_that_says_what_lies_there(tmp_path, monkeypatch):
    (tmp_path / "real.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match=r"no model at .*missing\.gguf.* holds \['real\.gguf'\]"):
        load(tmp_path / "missing.gguf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"no model at \"missing\.gguf\".* holds \['real\.gguf'\]"):
        load("missing.gguf")


DAMAGES = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "holds .'generation_config.json'"),
    "cut configuration": (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
    "cut weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "could not be read as a causal"),
    "no tokenizer": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
        r"was read, but no tokenizer beside it .* pass one: rs\.load\(.*, tokenizer=\.\.\.\)",
    ),
    "other shapes": (
        lambda folder: SUPPORTED["llama"](intermediate_size=40).config.save_pretrained(folder),
        "could not be read as a causal language model",
    ),
    "other parts": (
        lambda folder: SUPPORTED["llama"](num_hidden_layers=4).config.save_pretrained(folder),
        r"does not hold the weights 'model\.layers\.3\..* of a LlamaForCausalLM, which would be random",
    ),
    "no language head": (
        lambda folder: SUPPORTED["llama"]().model.save_pretrained(folder),
        r"does not hold the weights 'lm_head\.weight' of a LlamaForCausalLM, which would be random",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_an_error(damage, folder):
    break_it, message = DAMAGES[damage]
    break_it(folder)
    with pytest.raises(LoadError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(("name", "content"), [("a.gguf", b"GGUF cut"), ("b.gguf", b""), ("notes.txt", b"hello")])
def test_a_file_that_is_no_model_is_an_error(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=f'the file ".*{name}" could not be read as a model: .+; give a .gguf file'):
        load(tmp_path / name)


@pytest.mark.parametrize("name", ["gpt2", "nobody/nothing", "no such model!"])
def test_a_hub_id_without_network_is_an_error(name):
    with pytest.raises(LoadError) as caught:
        load(name)
    assert str(caught.value).startswith(f'"{name}" is not a bundled model (smollm2), not a local folder, and could not')
    assert str(caught.value).endswith("check the spelling and the network, or give the path of a local folder")


# TransformerBridge


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "gptj", "falcon_old"])
def test_a_bridge_equals_the_model_inside_it(name):
    expected, bridge, ids = (
        hooked(SUPPORTED[name](), some_ids(2, 9)).logits,
        bridge_of(SUPPORTED[name]()),
        some_ids(2, 9),
    )
    before = state_of(bridge.original_model)
    model = load(bridge)
    assert isinstance(model, BridgeLM)
    with torch.no_grad():
        assert apart(model.logits(ids), expected) < CLOSE
        assert apart(model.logits(ids), bridge(ids)) < CLOSE
    assert state_of(bridge.original_model) == before


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "gptj", "falcon_old"])
def test_a_bridge_in_compatibility_mode_differs_by_a_shift_of_each_positions_logits(name):
    expected, ids = hooked(SUPPORTED[name](), some_ids(2, 9)).logits, some_ids(2, 9)
    bridge = bridge_of(SUPPORTED[name](), compatible=True)
    before = state_of(bridge.original_model)
    model = load(bridge)
    with torch.no_grad():
        logits = model.logits(ids)
        assert apart(logits, bridge(ids)) < CLOSE
    assert apart(logits.log_softmax(-1), expected.log_softmax(-1)) < CLOSE
    assert apart(logits - logits[..., :1], expected - expected[..., :1]) < CLOSE
    shift = logits - expected
    assert apart(shift, shift[..., :1].expand_as(shift)) < 1e-3, "one number a position"
    assert shift.abs().max() > 1e-3, "and not none"
    assert state_of(bridge.original_model) == before


@pytest.mark.parametrize("compatible", [False, True])
def test_a_bridge_whose_attention_is_wrong_is_refused(compatible):
    hf_model = SUPPORTED["falcon_new"](multi_query=False)
    expected, bridge = (
        hooked(copy.deepcopy(hf_model), some_ids(1, 9)).logits,
        bridge_of(hf_model, compatible=compatible),
    )
    with torch.no_grad():
        found = bridge(some_ids(1, 9)).log_softmax(-1)
    assert apart(found, expected.log_softmax(-1)) > 1e-3, "its logits are wrong"
    with pytest.raises(
        UnsupportedModelError, match=r"at layer 0 .*'bridged attention = the original attention'.* off by"
    ):
        load(bridge, name="falcon")


def test_a_bridge_with_a_planted_error_in_its_attention_is_refused(monkeypatch):
    bridge = bridge_of(SUPPORTED["llama"]())
    assert load(bridge).check.passed
    honest = type(bridge.blocks[1].attn).forward

    def forward(self, *args, **kwargs):
        output = honest(self, *args, **kwargs)
        return (output[0] * 1.001, *output[1:]) if getattr(self, "planted", False) else output

    bridge.blocks[1].attn.planted = True
    monkeypatch.setattr(type(bridge.blocks[1].attn), "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"at layer 1 .*bridged attention"):
        load(bridge)


@pytest.mark.parametrize("first", ["load", "hook"])
def test_the_users_hooks_on_a_bridge_still_fire(first):
    bridge, ids, fired = bridge_of(SUPPORTED["gpt2"]()), some_ids(2, 9), []

    def edit(tensor, hook):
        fired.append(hook.name)
        return tensor * 0.5

    with torch.no_grad():
        plain = bridge(ids)
        if first == "load":
            model = load(bridge)
            bridge.add_hook("blocks.1.attn.hook_out", edit)
        else:
            bridge.add_hook("blocks.1.attn.hook_out", edit)
            model = load(bridge)
        fired.clear()
        logits = model.logits(ids)
        assert set(fired) == {"blocks.1.attn.hook_out"}
        edited = bridge(ids)
        assert apart(logits, edited) < CLOSE
        assert apart(edited, plain) > 1e-3
        bridge.reset_hooks()
        assert apart(model.logits(ids), plain) < CLOSE


def test_a_bridge_reads_text_with_the_tokenizer_alone():
    own, hf_model = tokenizer(), SUPPORTED["llama"]()
    own.bos_token = "w0"
    expected = hooked(SUPPORTED["llama"](), torch.tensor([[3, 1, 4]])).logits
    model = load(bridge_of(hf_model), tokenizer=own)
    assert model.tokenize("w3 w1 w4").ids.tolist() == [[3, 1, 4]]
    with torch.no_grad():
        assert apart(model.logits("w3 w1 w4"), expected) < CLOSE


# The certificate


@pytest.fixture
def kept(folder, monkeypatch):
    """The folder as that of a bundled model, whose certificate is kept."""
    monkeypatch.setitem(bundled.BUNDLED, "tiny", bundled.BUNDLED["smollm2"])
    monkeypatch.setattr(bundled, "obtain", lambda name: folder)
    return folder


def test_a_second_load_is_not_proved_again(kept, proofs):
    first, second = load("tiny"), load("tiny")
    assert proofs == ["tiny"]
    assert second.check == first.check
    assert second.check.passed
    with torch.no_grad():
        expected = hooked(SUPPORTED["llama"](), some_ids(2, 9)).logits
        assert apart(second.logits(some_ids(2, 9)), expected) < CLOSE
        assert second.in_float64().check.passed


def test_what_is_known_of_the_left_context_is_kept(kept, monkeypatch):
    monkeypatch.setattr(causal_lm, "suffixes_agree", lambda model: False)
    assert not load("tiny").reuses_left
    monkeypatch.undo()
    monkeypatch.setitem(bundled.BUNDLED, "tiny", bundled.BUNDLED["smollm2"])
    monkeypatch.setattr(bundled, "obtain", lambda name: kept)
    assert not load("tiny").reuses_left
    next(kept.glob("verified-*")).unlink()
    assert load("tiny").reuses_left


CHANGES = {
    "weights": lambda folder: SUPPORTED["llama"](tie_word_embeddings=True).save_pretrained(folder),
    "weights of the same size": lambda folder: os.utime(folder / "model.safetensors", (1, 1)),
    "configuration": lambda folder: SUPPORTED["llama"](rms_norm_eps=0.5).config.save_pretrained(folder),
    "certificate cut": lambda folder: next(folder.glob("verified-*.json")).write_text("{"),
    "certificate empty": lambda folder: next(folder.glob("verified-*.json")).write_text("{}"),
    "certificate of another kind": lambda folder: next(folder.glob("verified-*.json")).write_text("[1]"),
    "certificate gone": lambda folder: next(folder.glob("verified-*.json")).unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_proved_again(change, kept, proofs):
    load("tiny")
    CHANGES[change](kept)
    load("tiny")
    assert proofs == ["tiny"] * 2
    load("tiny")
    assert proofs == ["tiny"] * 2


def test_another_type_is_proved_again(kept, proofs):
    load("tiny")
    assert load("tiny", dtype=torch.bfloat16).check.tolerance == 0.05
    assert proofs == ["tiny"] * 2
    assert load("tiny").check.tolerance == 1e-5
    assert proofs == ["tiny"] * 2


def test_a_failed_proof_is_not_kept(kept):
    REFUSED["opt_post_ln"]().save_pretrained(kept)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="at layer"):
            load("tiny")
    assert list(kept.glob("verified-*")) == []


def test_folders_that_are_not_bundled_keep_nothing(folder, proofs):
    load(folder)
    load(folder)
    assert proofs == ["copy"] * 2
    assert list(folder.glob("verified-*")) == []


def test_a_certificate_comes_back_as_it_was_kept(folder):
    returns = {"Block": None, "Attention": ("tuple", 2)}
    certificate = Certificate(Check("a = b", 1e-8, 1e-5, "layer 2"), returns, reuses_left=True)
    assert recall(folder, "cpu", "float32") is None
    keep(certificate, folder, "cpu", "float32")
    assert recall(folder, "cpu", "float32") == certificate
    assert recall(folder, "cpu", "bfloat16") is None
    assert len(list(folder.glob("verified-*"))) == 1
    assert json.loads(next(folder.glob("verified-*")).read_text())["check"]["where"] == "layer 2"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    keep(Certificate(Check("a = b", 0.0, 1e-5), {}, reuses_left=False), tmp_path / "nowhere")
    assert recall(tmp_path / "nowhere") is None
