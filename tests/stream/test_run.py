"""The executor's rows against one plain run with hooks for each of them."""

from __future__ import annotations

import random
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from models.test_trunk import plant
from stream.test_edits import VECTOR, at
from stream.test_read import ARCHITECTURES, CLOSE, Planted, by_hooks
from tiny import LAYERS, apart, blocks_of, state_of, tokenizer

import resstream as rs
from resstream.models.causal_lm import CausalTrunk
from resstream.sites import Site
from resstream.stream import run as run_module
from resstream.stream.rows import Base, Put, Row, boundaries, entry_after
from resstream.stream.run import run, score_all

NAMES = ("gpt2", "llama", "neox_parallel", "gemma2")
PROMPTS = ["w1 w2 w3 w4 w5 w6", "w9 w8 w7", "w3 w1 w4 w1 w5", "w7 w2 w9"]


# Batching is the same on every architecture, so these two stand for all.
two_layouts = pytest.mark.parametrize("name", ["llama", "neox_parallel"], indirect=True)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return ARCHITECTURES[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


def entries(model):
    """The states that a row can join at."""
    middles = [] if model.layout == "parallel" else [Site(layer, "resid_mid") for layer in range(LAYERS)]
    return [*boundaries(model)[:-1], *middles, boundaries(model)[-1]]


def base_of(model, metric=None, prompts=PROMPTS):
    """A base run of some prompts, and its metric as a function of last residuals."""
    tokens = model.tokenize(prompts)
    base = Base.of(model, tokens, entries(model))
    return base, (metric or rs.logit_diff(4, 5)).bind(model, tokens, base.final)


def scores_of(base, score):
    return score_all([score], base)[:, 0]


def scored(model, base, rows, score, **options):
    """The one score of each row."""
    return run(model, base, rows, [score], score_all([score], base), **options)[:, 0]


def difference(logits):
    """What the metric reads off the logits of one prompt."""
    return logits[-1, 4] - logits[-1, 5]


def rows_and_hooks(model, base):
    """Rows of every kind, and for each the prompt and the changes that make a plain run the same."""
    pairs = []
    everywhere = Put(VECTOR.expand(base.tokens.width, -1))
    for prompt in range(len(PROMPTS)):
        for number, site in enumerate(entries(model)):
            position = number % base.tokens.lengths[prompt]
            moved = at(position, lambda value: value + VECTOR)
            stream = partial(lambda site, prompt, moved: moved(base.values[site][[prompt]])[0], site, prompt, moved)
            pairs.append((Row(prompt, site, stream), {str(site): moved}))
        for layer in range(LAYERS):
            for kind in ("attn", "mlp"):
                enter = Site(layer - 1 if layer else 0, "resid_pre")
                written = {Site(layer, kind): everywhere}
                pairs.append((Row(prompt, enter, None, written), {f"{layer}.{kind}": lambda v: VECTOR.expand_as(v)}))
                pairs.append(
                    (Row(prompt, enter, None, {Site(layer, kind): None}), {f"{layer}.{kind}": torch.zeros_like})
                )
        several = {Site(0, "mlp"): None, Site(1, "attn"): everywhere, Site(1, "mlp"): None}
        hooks = {"0.mlp": torch.zeros_like, "1.attn": lambda v: VECTOR.expand_as(v), "1.mlp": torch.zeros_like}
        start = partial(lambda prompt: base.values[Site(0, "resid_pre")][prompt] + VECTOR, prompt)
        hooks = {"0.resid_pre": lambda v: v + VECTOR, **hooks}
        pairs.append((Row(prompt, Site(0, "resid_pre"), start, several), hooks))
    random.Random(0).shuffle(pairs)
    return pairs


def every_row_is_a_plain_run(name, hf_model, model):
    base, score = base_of(model)
    pairs = rows_and_hooks(model, base)
    found = scored(model, base, [row for row, _ in pairs], score)
    with torch.no_grad():
        ids = [model.tokenize(prompt).ids for prompt in PROMPTS]
        expected = [difference(by_hooks(name, hf_model, ids[row.prompt], changes).logits) for row, changes in pairs]
        plain = [difference(by_hooks(name, hf_model, each).logits) for each in ids]
    assert apart(found, torch.stack(expected)) < 2 * CLOSE
    assert apart(scores_of(base, score), torch.stack(plain)) < 2 * CLOSE
    moved = [abs(found[i] - scores_of(base, score)[row.prompt]) > 1e-5 for i, (row, _) in enumerate(pairs)]
    assert sum(moved) > 0.8 * len(pairs), "and nearly each does something; the last states before the last token cannot"


def test_every_row_is_a_plain_run(name, hf_model, model):
    every_row_is_a_plain_run(name, hf_model, model)


@pytest.mark.parametrize(("method", "kind"), [("layer", None), ("write", "attn"), ("write", "mlp")])
def test_a_row_that_is_off_is_noticed(method, kind, name, hf_model, model, monkeypatch):
    """The twin of the test above."""
    plant(monkeypatch, CausalTrunk, method, kind)
    with pytest.raises(AssertionError):
        every_row_is_a_plain_run(name, hf_model, model)


@two_layouts
def test_a_row_equals_that_row_alone(name, model):
    base, score = base_of(model)
    rows = [row for row, _ in rows_and_hooks(model, base)]
    together = scored(model, base, rows, score)
    alone = torch.cat([scored(model, base, [row], score) for row in rows])
    assert apart(together, alone) < CLOSE
    backwards = scored(model, base, rows[::-1], score)
    assert apart(backwards.flip(0), together) < CLOSE


@two_layouts
@pytest.mark.parametrize("budget", [1, 40])
def test_chunks_change_nothing(budget, name, model, monkeypatch):
    base, score = base_of(model)
    rows = [row for row, _ in rows_and_hooks(model, base)]
    together = scored(model, base, rows, score)
    monkeypatch.setattr(run_module, "TOKENS_PER_CHUNK", budget)
    with counted(model) as count:
        in_chunks = scored(model, base, rows, score)
    assert max(count["rows"]) == max(1, budget // 6), "a row has six positions"
    assert apart(in_chunks, together) < CLOSE


@contextmanager
def counted(model):
    """How many rows each call of a block has, by hooks."""
    count = {"rows": []}

    def note(_, args, kwargs):
        count["rows"].append(len(args[0] if args else kwargs["hidden_states"]))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks_of(model.hf_model)]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def test_rows_that_change_nothing_are_not_run(model):
    """They get the base score bit for bit, also where only the padding differs."""
    base, score = base_of(model)
    rows = []
    for prompt in range(len(PROMPTS)):
        for site in entries(model):
            plain = base.values[site][prompt]
            rows.append(Row(prompt, site, lambda plain=plain: plain))
            padded = plain.clone()
            padded[base.tokens.lengths[prompt] :] += 1
            rows.append(Row(prompt, site, lambda padded=padded: padded))
    with counted(model) as count:
        found = scored(model, base, rows, score)
    assert count["rows"] == []
    assert torch.equal(found, scores_of(base, score)[[row.prompt for row in rows]])
    changed = Row(0, Site(1, "resid_pre"), lambda: base.values[Site(1, "resid_pre")][0] + VECTOR)
    with counted(model) as count:
        scored(model, base, [*rows, changed], score)
    assert count["rows"] == [1] * (LAYERS - 1), "and what does change runs alone, from where it enters"


def test_a_change_of_a_thousandth_is_run(model):
    """The twin of the test above."""
    base, score = base_of(model)
    site = Site(0, "resid_pre")
    stream = base.values[site][1].clone()
    stream[0, 0] *= 1.001
    with counted(model) as count:
        found = scored(model, base, [Row(1, site, lambda: stream)], score)
    assert count["rows"]
    assert not torch.equal(found[0], scores_of(base, score)[1])


def test_a_row_that_is_another_prompts_run_gets_its_score(name, hf_model, model):
    """Identity 3: all positions of one boundary taken from a donor; the score is the donor's, bit for bit."""
    base, score = base_of(model)
    rows = [Row(1, site, lambda site=site: base.values[site][3], twins=(3,)) for site in entries(model)]
    with counted(model) as count:
        found = scored(model, base, rows, score)
    assert count["rows"] == []
    assert torch.equal(found, scores_of(base, score)[3].expand(len(rows)))
    with torch.no_grad():
        expected = difference(by_hooks(name, hf_model, model.tokenize(PROMPTS[3]).ids).logits)
    assert apart(found, expected.expand(len(rows))) < 2 * CLOSE
    lengths = [Row(1, Site(0, "resid_pre"), lambda: base.values[Site(0, "resid_pre")][0], twins=(0,))]
    with counted(model) as count:
        scored(model, base, lengths, score)
    assert count["rows"], "a donor of another length is not the same run"


@pytest.mark.parametrize("metric", [rs.loss(), rs.kl_from_base()])
def test_a_metric_that_sees_the_prompt_scores_anothers_run_anew(metric, name, hf_model, model):
    """With the stream of a donor, a prompt still has its own next tokens and its own base run."""
    base, score = base_of(model, metric)
    ids = [model.tokenize(prompt).ids for prompt in PROMPTS]
    with torch.no_grad():
        seen = [by_hooks(name, hf_model, each).logits.log_softmax(-1) for each in (ids[1], ids[3])]
    own, donor = seen
    loss = -donor[:-1].gather(1, ids[1][0, 1:, None]).mean()
    kl = (own.exp() * (own - donor)).sum(-1).mean()
    rows = [Row(1, site, lambda site=site: base.values[site][3], twins=(3,)) for site in entries(model)]
    found = scored(model, base, rows, score)
    assert apart(found, (loss if metric.name == "loss" else kl).expand(len(rows))) < 1e-4
    donors = scores_of(base, score)[3].expand(len(rows))
    assert not torch.allclose(found, donors, rtol=1e-2), "the donor's own score is another"


def test_no_rows(model):
    base, score = base_of(model)
    assert scored(model, base, [], score).shape == (0,)


def test_entries(name, model):
    kinds = 1 if model.layout == "parallel" else 2
    assert len(entries(model)) == kinds * LAYERS + 1
    assert entry_after(model, 0) == Site(1, "resid_pre")
    assert entry_after(model, LAYERS - 1) == entries(model)[-1] == Site(LAYERS - 1, "resid_post")


def test_streams_are_made_late(monkeypatch):
    """No more streams are alive than one chunk has."""
    model = rs.load(ARCHITECTURES["llama"](), tokenizer=tokenizer())
    base, score = base_of(model)
    alive, most = [0], [0]
    monkeypatch.setattr(run_module, "TOKENS_PER_CHUNK", 12)

    def gone():
        alive[0] -= 1

    def stream():
        made = base.values[Site(0, "resid_pre")][0] + VECTOR
        weakref.finalize(made, gone)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return made

    rows = [Row(0, Site(0, "resid_pre"), stream, {Site(1, "mlp"): None}) for _ in range(8)]
    scored(model, base, rows, score)
    assert alive == [0]
    assert 2 <= most[0] <= 3, "two rows of six positions a chunk, not all eight"


def test_progress_is_shown_when_asked_for(model, capsys):
    base, score = base_of(model)
    rows = [row for row, _ in rows_and_hooks(model, base)][:5]
    scored(model, base, rows, score, progress="some rows")
    assert "some rows: 100%" in capsys.readouterr().err
    scored(model, base, rows, score)
    assert capsys.readouterr().err == ""


def test_the_model_is_as_it_was(name):
    hf_model = ARCHITECTURES[name]().train()
    model = rs.load(hf_model, tokenizer=tokenizer())
    base, score = base_of(model)
    rows = [row for row, _ in rows_and_hooks(model, base)]
    before = state_of(hf_model)
    scored(model, base, rows, score)
    assert state_of(hf_model) == before

    def fail(*_):
        raise Planted

    handle = blocks_of(hf_model)[-1].register_forward_pre_hook(fail)
    failing = state_of(hf_model)
    with pytest.raises(Planted):
        scored(model, base, rows, score)
    assert state_of(hf_model) == failing
    handle.remove()
    assert state_of(hf_model) == before
