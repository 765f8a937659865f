"""Metrics against plain torch on the logits of the Hugging Face model, one prompt at a time."""

from __future__ import annotations

import pytest
import torch
from models.test_trunk import plant
from stream.test_read import CLOSE, says, unchecked
from tiny import SUPPORTED, apart, some_ids, tokenizer

import resstream as rs
from resstream.errors import MetricError, PromptError
from resstream.measure import metrics
from resstream.measure.metrics import as_metric
from resstream.models.causal_lm import CausalLM
from resstream.models.tokens import Tokens

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w9 w8 w7", "w3 w1 w4 w1 w5"]
RIGHT, WRONG = ["w4", 5, "w6"], [7, "w8", "w9"]
NAMES = ("gpt2", "llama", "neox_parallel", "gemma2", "granite")


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def toy():
    return rs.load(SUPPORTED["llama"](), name="toy", tokenizer=tokenizer())


def ids_of(answer):
    return answer if isinstance(answer, int) else int(answer[1:])


# Each metric, and the same by hand: from one prompt's logits, its ids, its number, and the logits of its base run.
METRICS = {
    "logit_diff": (rs.logit_diff("w4", 5), lambda logits, ids, row, base: logits[-1, 4] - logits[-1, 5]),
    "logit_diff each": (
        rs.logit_diff(RIGHT, WRONG),
        lambda logits, ids, row, base: logits[-1, ids_of(RIGHT[row])] - logits[-1, ids_of(WRONG[row])],
    ),
    "log_prob": (rs.log_prob("w4"), lambda logits, ids, row, base: torch.log(logits[-1].softmax(-1)[4])),
    "log_prob each": (
        rs.log_prob(RIGHT),
        lambda logits, ids, row, base: torch.log(logits[-1].softmax(-1)[ids_of(RIGHT[row])]),
    ),
    "loss": (
        rs.loss(),
        lambda logits, ids, row, base: (
            -torch.stack([torch.log(logits[i].softmax(-1)[ids[i + 1]]) for i in range(len(ids) - 1)]).mean()
        ),
    ),
    "kl_from_base": (
        rs.kl_from_base(),
        lambda logits, ids, row, base: torch.stack(
            [(p.softmax(-1) * (p.softmax(-1) / q.softmax(-1)).log()).sum() for p, q in zip(base, logits, strict=True)]
        ).mean(),
    ),
}


def values_by_hand(hf_model, model, case, noisy):
    """The metric of each prompt run alone, with another vector added to the last block's output for each row."""
    _, by_hand = METRICS[case]
    values = []
    for row, prompt in enumerate(PROMPTS):
        ids = model.tokenize(prompt).ids
        with torch.no_grad():
            base = hf_model(input_ids=ids).logits[0].double()
            handle = last_block(hf_model).register_forward_hook(
                lambda _, args, output, row=row: shifted(output, noisy[row])
            )
            logits = hf_model(input_ids=ids, use_cache=False).logits[0].double()
            handle.remove()
        values.append(by_hand(logits, ids[0], row, base))
    return torch.stack(values)


def last_block(hf_model):
    return next(module for module in hf_model.modules() if isinstance(module, torch.nn.ModuleList))[-1]


def shifted(output, vector):
    return output + vector if isinstance(output, torch.Tensor) else (output[0] + vector, *output[1:])


def the_metric_is_right(hf_model, model, case):
    noisy = torch.randn(len(PROMPTS), 32, generator=torch.Generator().manual_seed(1))
    tokens = model.tokenize(PROMPTS)
    with torch.no_grad():
        base = model.trunk(tokens).run()
        score = METRICS[case][0].bind(model, tokens, base)
        order = [2, 0, 1, 0]
        found = score(base[order] + noisy[order][:, None], order)
        unchanged = score(base, range(len(PROMPTS)))
    expected = values_by_hand(hf_model, model, case, noisy)
    assert found.shape == (4,)
    assert apart(found.double(), expected[order]) < 10 * CLOSE
    expected = values_by_hand(hf_model, model, case, 0 * noisy)
    assert float((unchanged.double() - expected).abs().max()) < 10 * CLOSE


@pytest.mark.parametrize("case", METRICS)
def test_a_metric_equals_plain_torch_on_the_models_logits(case, hf_model, model):
    the_metric_is_right(hf_model, model, case)


@pytest.mark.parametrize("case", METRICS)
def test_a_metric_that_is_off_is_noticed(case, hf_model, model, monkeypatch):
    """The twin of the test above: the readout is off by 0.1 %."""
    plant(monkeypatch, CausalLM, "readout")
    with pytest.raises(AssertionError):
        the_metric_is_right(hf_model, model, case)


@pytest.mark.parametrize("budget", [1, 4 * 64 * 3])
@pytest.mark.parametrize("case", METRICS)
def test_pieces_change_nothing(case, budget, hf_model, model, monkeypatch):
    monkeypatch.setattr(metrics, "_PIECE", budget)
    the_metric_is_right(hf_model, model, case)


def test_on_smollm2(smollm2):
    prompts = ["When Mary and John went to the store, John gave a drink to", "The Eiffel Tower is in the city of"]
    cases = {
        "diff": (
            rs.logit_diff(" Mary", [" John", " Paris"]),
            lambda z, ids, row: z[-1, MARY] - z[-1, (JOHN, PARIS)[row]],
        ),
        "prob": (rs.log_prob([" Mary", " Paris"]), lambda z, ids, row: z[-1].log_softmax(-1)[(MARY, PARIS)[row]]),
        "loss": (rs.loss(), lambda z, ids, row: torch.nn.functional.cross_entropy(z[:-1], ids[0, 1:])),
    }
    MARY, JOHN, PARIS = (smollm2.tokenizer(text)["input_ids"][0] for text in (" Mary", " John", " Paris"))
    with torch.no_grad():
        ids = [smollm2.tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]
        logits = [smollm2.hf_model(input_ids=each).logits[0].double() for each in ids]
        tokens = smollm2.tokenize(prompts)
        final = smollm2.trunk(tokens).run()
        for metric, by_hand in cases.values():
            found = metric.bind(smollm2, tokens, final)(final, [0, 1])
            expected = torch.stack([by_hand(logits[row], ids[row], row) for row in (0, 1)])
            assert float((found - expected).abs().max()) < CLOSE * float(logits[0].abs().max())
    assert float(logits[0][-1, MARY] - logits[0][-1, JOHN]) == pytest.approx(6.1196, abs=1e-3)


def test_a_function_of_the_logits_sees_the_models_logits(hf_model, model):
    ids, seen = some_ids(3, 5), []

    def best(logits):
        seen.append(logits)
        return logits[:, -1].max(-1).values

    metric = as_metric(best)
    tokens = model.tokenize(ids)
    with torch.no_grad():
        final = model.trunk(tokens).run()
        found = metric.bind(model, tokens, final)(final, range(3))
        expected = hf_model(input_ids=ids).logits
    assert (metric.name, metric.units) == ("best", "its own units")
    assert apart(torch.cat(seen), expected) < CLOSE
    assert apart(found, expected[:, -1].amax(-1)) < CLOSE


def test_a_function_sees_pieces_of_its_rows(toy, monkeypatch):
    monkeypatch.setattr(metrics, "_PIECE", 4 * 64 * 5 * 2)
    tokens, sizes = toy.tokenize(some_ids(5, 5)), []

    def size(logits):
        sizes.append(len(logits))
        return logits[:, -1, 0]

    with torch.no_grad():
        final = toy.trunk(tokens).run()
        found = as_metric(size).bind(toy, tokens, final)(final, range(5))
        assert apart(found, toy.logits(some_ids(5, 5))[:, -1, 0]) < CLOSE
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_float32(dtype):
    """Case 15: half precision cannot tell 20.03 from 19.97; what is done to its logits is done in float32."""
    hf_model = SUPPORTED["llama"]().to(dtype)
    model = rs.load(hf_model, tokenizer=tokenizer())
    tokens = model.tokenize(PROMPTS[0])
    with torch.no_grad():
        final = model.trunk(tokens).run()
        logits = hf_model(input_ids=tokens.ids).logits[0].float()
        for case in ("log_prob", "loss", "logit_diff"):
            metric, by_hand = METRICS[case]
            found = metric.bind(model, tokens, final)(final, [0])
            assert found.dtype == torch.float32
            assert apart(found[0], by_hand(logits, tokens.ids[0], 0, None)) < 10 * CLOSE


def test_gradients_flow_through_metrics(hf_model, model):
    """Each metric's gradient at the last residual equals autograd through a hook on the last block."""
    (prompt,) = PROMPTS[2:]
    tokens = model.tokenize(prompt)
    with torch.no_grad():
        final, base = model.trunk(tokens).run(), hf_model(input_ids=tokens.ids).logits[0]
    for case in ("logit_diff", "log_prob", "loss", "kl_from_base"):
        metric, by_hand = METRICS[case]
        leaf = (final + 0.3 * final.roll(1, -1)).requires_grad_()
        handle = last_block(hf_model).register_forward_hook(
            lambda _, args, output, leaf=leaf: leaf if isinstance(output, torch.Tensor) else (leaf, *output[1:])
        )
        logits = hf_model(input_ids=tokens.ids, use_cache=False).logits[0]
        handle.remove()
        (expected,) = torch.autograd.grad(by_hand(logits, tokens.ids[0], 0, base), leaf)
        (found,) = torch.autograd.grad(metric.bind(model, tokens, final)(leaf, [0]).sum(), leaf)
        assert apart(found, expected) < 10 * CLOSE


def test_names_and_units():
    assert rs.logit_diff(" Mary", " John").name == "logit difference ' Mary' - ' John'"
    assert rs.logit_diff(RIGHT, WRONG).name == "logit difference of 3 answers - of 3 answers"
    assert rs.logit_diff(["a", "a"], 7).name == "logit difference 'a' - 7"
    assert rs.log_prob(" Paris").name == "log-probability of ' Paris'"
    assert [metric().units for metric in (rs.loss, rs.kl_from_base)] == ["nats", "nats"]
    assert isinstance(as_metric(None), rs.loss)
    metric = rs.log_prob(3)
    assert as_metric(metric) is metric


# Answers of several tokens

ANSWERS = ["w4 w9 w2", 5, "w7 w1"]


def log_probs_by_hand(hf_model, prompts, answers, changed=None):
    """The log-probability of each answer, its tokens one by one, after its prompt alone, in a plain forward pass."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt if isinstance(answer, int) else f"{prompt} {answer}"
        ids = [*map(ids_of, text.split()), *([answer] if isinstance(answer, int) else [])]
        start = len(prompt.split())
        handle = None if changed is None else changed(hf_model)
        with torch.no_grad():
            logits = hf_model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
        if handle is not None:
            handle.remove()
        scores = [torch.log(logits[at - 1].softmax(-1)[ids[at]]) for at in range(start, len(ids))]
        found.append(torch.stack(scores).sum())
    return torch.stack(found)


def whole_answers_are_scored(hf_model, model):
    metric = rs.log_prob(ANSWERS)
    tokens = metric.extend(model, model.tokenize(PROMPTS))
    with torch.no_grad():
        base = model.trunk(tokens).run()
        found = metric.bind(model, tokens, base)(base[[2, 0, 1, 0]], [2, 0, 1, 0])
    assert tokens.forced == (2, 0, 1)
    assert apart(found.double(), log_probs_by_hand(hf_model, PROMPTS, ANSWERS)[[2, 0, 1, 0]]) < 10 * CLOSE


def test_an_answer_is_scored_whole(hf_model, model):
    whole_answers_are_scored(hf_model, model)


@pytest.mark.parametrize("budget", [1, 4 * 64 * 3])
def test_pieces_change_nothing_in_a_whole_answer(budget, hf_model, model, monkeypatch):
    monkeypatch.setattr(metrics, "_PIECE", budget)
    whole_answers_are_scored(hf_model, model)


@pytest.mark.parametrize("planted", ["the last token alone", "one position late", "padding read"])
def test_a_whole_answer_that_is_off_is_noticed(planted, hf_model, model, monkeypatch):
    """The twin of the tests above."""
    real = metrics.answer_tokens
    if planted == "the last token alone":
        monkeypatch.setattr(metrics, "force", lambda tokens, answers, **_: tokens)
        monkeypatch.setattr(metrics, "require_forced", lambda *_: None)
        monkeypatch.setattr(metrics, "answer_tokens", lambda *args: [ids[-1:] for ids in real(*args)])
    elif planted == "one position late":
        late = property(lambda tokens: tuple(own for own in tokens.own_lengths))
        monkeypatch.setattr(Tokens, "last", late)
        monkeypatch.setattr(metrics, "require_forced", lambda *_: None)
    else:
        monkeypatch.setattr(Tokens, "last", property(lambda tokens: (max(tokens.own_lengths) - 1,) * len(tokens)))
        monkeypatch.setattr(metrics, "require_forced", lambda *_: None)
    with pytest.raises((AssertionError, IndexError)):
        whole_answers_are_scored(hf_model, model)


def test_the_gradient_of_a_whole_answer(hf_model, model):
    """It equals autograd through a hook on the last block, and reaches the positions that tokens are predicted from."""
    (prompt,), (answer,) = PROMPTS[:1], ANSWERS[:1]
    metric = rs.log_prob(answer)
    tokens = metric.extend(model, model.tokenize(prompt))
    with torch.no_grad():
        final = model.trunk(tokens).run()
    leaf = (final + 0.3 * final.roll(1, -1)).requires_grad_()
    handle = last_block(hf_model).register_forward_hook(
        lambda _, args, output: leaf if isinstance(output, torch.Tensor) else (leaf, *output[1:])
    )
    logits = hf_model(input_ids=tokens.ids, use_cache=False).logits[0]
    handle.remove()
    by_hand = sum(logits[5 + step].log_softmax(-1)[token] for step, token in enumerate((4, 9, 2)))
    (expected,) = torch.autograd.grad(by_hand, leaf)
    (found,) = torch.autograd.grad(metric.bind(model, tokens, final)(leaf, [0]).sum(), leaf)
    assert apart(found, expected) < 10 * CLOSE
    assert found[0].abs().sum(-1).nonzero()[:, 0].tolist() == [5, 6, 7]


def test_one_token_answers_leave_the_prompts_alone(toy):
    tokens = toy.tokenize(PROMPTS)
    for metric in (rs.log_prob("w4"), rs.log_prob(RIGHT), rs.logit_diff("w4", 5), rs.loss(), rs.kl_from_base()):
        assert metric.extend(toy, tokens) is tokens
    assert metrics.extended(toy, tokens, []) is tokens


def test_positions_are_counted_in_the_prompt_alone(toy):
    """ "last" and negative numbers mean the prompt's own last token, whatever it is made to answer."""
    tokens = rs.log_prob(ANSWERS).extend(toy, toy.tokenize(PROMPTS))
    assert (tokens.lengths, tokens.own_lengths, tokens.last) == ((8, 3, 6), (6, 3, 5), (5, 2, 4))
    for position in (-1, "last"):
        assert tokens.at(position).nonzero().tolist() == [[0, 5], [1, 2], [2, 4]]
    assert tokens.at(slice(-2, None)).nonzero()[:, 1].tolist() == [4, 5, 1, 2, 3, 4]
    assert tokens.at(None).sum(1).tolist() == [8, 3, 6]
    assert tokens.strings[0] == ("w1", "w2", "w3", "w4", "w5", "w6", "w4", "w9")


def test_ablation_scores_a_whole_answer(hf_model, model):
    found = rs.ablate_layers(model, PROMPTS, layers=[1], metric=rs.log_prob(ANSWERS)).data

    def without(hf_model):
        layer = next(each for each in hf_model.modules() if isinstance(each, torch.nn.ModuleList))[1]
        return layer.register_forward_hook(
            lambda _, args, output: args[0] if isinstance(output, torch.Tensor) else (args[0], *output[1:])
        )

    own, other = (log_probs_by_hand(hf_model, PROMPTS, ANSWERS, changed) for changed in (None, without))
    assert apart(torch.from_numpy(found.base.values), own) < 10 * CLOSE
    assert apart(torch.from_numpy(found.metric.values[:, 0]), other) < 10 * CLOSE
    assert found.text.values.tolist() == [prompt.replace(" ", "") for prompt in PROMPTS]


def test_the_ensemble_and_the_paths_score_a_whole_answer(toy):
    prompts, answers = PROMPTS[:2], ["w4 w9", "w7 w1"]
    own = log_probs_by_hand(toy.hf_model, prompts, answers).numpy()
    ensemble = rs.layer_ensemble(toy, prompts, rs.log_prob(answers))
    assert ensemble.check.passed
    assert ensemble.data.base.values == pytest.approx(own, abs=1e-4)
    assert rs.path_lengths(toy, prompts, rs.log_prob(answers), samples=0).check.passed


def test_a_whole_answer_on_smollm2(smollm2):
    prompts = ["The Eiffel Tower is in the city of", "Its capital is"]
    answers = [" Paris, France", " Buenos Aires"]
    with torch.no_grad():
        expected = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids, more = (smollm2.tokenizer(text)["input_ids"] for text in (prompt, answer))
            logits = smollm2.hf_model(input_ids=torch.tensor([ids + more])).logits[0].double().log_softmax(-1)
            expected.append(sum(logits[len(ids) - 1 + step, token] for step, token in enumerate(more)))
    found = rs.ablate_layers(smollm2, prompts, layers=[29], metric=rs.log_prob(answers))
    assert found.data.base.values == pytest.approx([float(each) for each in expected], abs=1e-4)
    assert found.check.passed


def test_a_missing_space_is_pointed_out(smollm2):
    with pytest.warns(UserWarning, match=r"'Tokyo' is scored as several tokens; did you mean ' Tokyo'\?"):
        tokens = rs.log_prob("Tokyo").extend(smollm2, smollm2.tokenize("The city of"))
    assert tokens.forced == (1,)


def test_metrics_that_want_different_answers_in_one_sweep(toy):
    tokens = toy.tokenize(PROMPTS)
    same = metrics.extended(toy, tokens, [rs.log_prob("w4 w9"), rs.log_prob("w4 w8")])
    assert same.forced == (1, 1, 1), "both are scored after w4"
    for other in (rs.log_prob("w5 w9"), rs.log_prob("w4 w8 w9"), rs.loss(), rs.logit_diff("w4", "w5")):
        with pytest.raises(MetricError) as error:
            metrics.extended(toy, tokens, [rs.log_prob("w4 w9"), other])
        assert says(error, "log-probability of 'w4 w9'", other.name, "cannot be measured in one sweep", "one at a time")


def test_an_answer_that_does_not_fit_the_context(toy):
    long = " ".join(["w1"] * (toy.max_positions - 1))
    rs.ablate_layers(toy, long, layers=[0], metric=rs.log_prob("w4 w9"))
    with pytest.raises(PromptError) as error:
        rs.ablate_layers(toy, long, layers=[0], metric=rs.log_prob("w4 w9 w2"))
    assert says(error, "prompt 0 has 65 tokens, the 2 of its answer that are run included", "reads at most 64")


def test_prompts_are_followed_by_one_answer_only(toy):
    metric = rs.log_prob("w4 w9")
    with pytest.raises(PromptError, match="are followed by an answer already; give the prompts alone"):
        metric.extend(toy, metric.extend(toy, toy.tokenize(PROMPTS)))


# Errors


def bind(model, metric, prompts):
    tokens = model.tokenize(prompts)
    with torch.no_grad():
        final = model.trunk(tokens).run()
        return metric.bind(model, tokens, final)(final, range(len(tokens)))


@pytest.mark.parametrize("metric", [rs.logit_diff, lambda a, b: rs.logit_diff(b, a)])
def test_a_logit_of_an_answer_of_several_tokens(metric, toy):
    with pytest.raises(MetricError) as error:
        bind(toy, metric("w1 w2", "w3"), PROMPTS)
    assert says(
        error,
        "the answer 'w1 w2'",
        "is 2 tokens ['w1', 'w2']",
        "one token, or score it whole with rs.log_prob('w1 w2')",
    )


def test_a_logit_of_an_answer_of_several_tokens_on_smollm2(smollm2):
    """A space in front is suggested where it helps, and only there."""
    for answer, pieces, hint in (
        ("Tokyo", "['To', 'kyo']", "did you mean ' Tokyo'?"),
        (" Eiffel", "[' E', 'iffel']", ""),
    ):
        with pytest.raises(MetricError) as error:
            bind(smollm2, rs.logit_diff(answer, " Paris"), "The city of")
        assert says(error, f"the answer {answer!r}", f"is 2 tokens {pieces}", "give an answer of one token", hint)
        assert bool(hint) == ("did you mean" in str(error.value))


def test_prompts_that_are_not_followed_by_their_answers(toy):
    """A metric that is bound to prompts that it did not extend cannot score the rest of its answer."""
    with pytest.raises(MetricError) as error:
        bind(toy, rs.log_prob(["w1", "w1 w2", "w3"]), PROMPTS)
    assert says(
        error,
        "the answer to prompt 1 is 2 tokens ['w1', 'w2']",
        "the prompt was run with [] after it",
        "run what metric.extend(model, tokens) gives",
    )


def test_an_answer_without_tokens(toy):
    with pytest.raises(MetricError) as error:
        bind(toy, rs.log_prob(""), PROMPTS)
    assert says(error, "the answer '' has no tokens", "give a word such as ' Paris'")


@pytest.mark.parametrize(("one", "other"), [("w4", "w4"), ("w4", 4), (["w1", "w2", "w3"], ["w4", "w2", "w5"])])
def test_two_answers_that_are_the_same_token(one, other, toy):
    with pytest.raises(MetricError) as error:
        bind(toy, rs.logit_diff(one, other), PROMPTS)
    assert says(error, "answers", "are the same token 'w", "always 0", "give two that differ")


def test_a_prompt_without_a_next_token(toy):
    with pytest.raises(MetricError) as error:
        bind(toy, rs.loss(), ["w1 w2", "w3"])
    assert says(
        error,
        "prompt 1 has one token",
        "no next token to take the loss of",
        "give a longer prompt, or a metric such as",
    )


@pytest.mark.parametrize("answer", [64, -1])
def test_an_id_out_of_range(answer, toy):
    with pytest.raises(MetricError) as error:
        bind(toy, rs.log_prob(answer), PROMPTS)
    assert says(error, f"no token id {answer}", "toy knows ids 0 to 63")


def test_a_list_of_the_wrong_length(toy):
    with pytest.raises(MetricError) as error:
        bind(toy, rs.log_prob(["w1", "w2"]), PROMPTS)
    assert says(error, "2 answers", "for 3 prompts", "give one answer, or one for each prompt")


def test_an_answer_as_text_without_a_tokenizer():
    model = rs.load(SUPPORTED["llama"](), name="mute")
    with pytest.raises(MetricError) as error:
        bind(model, rs.log_prob("w1"), some_ids(1, 3))
    assert says(error, "'w1'", "mute was loaded without a tokenizer", "give the answer 'w1' as a token id")
    assert bind(model, rs.log_prob(1), some_ids(1, 3)).shape == (1,)


@pytest.mark.parametrize("function", [lambda z: z[:, -1], lambda z: z.sum(), lambda z: z[:1, -1, 0]])
def test_a_function_that_returns_another_shape(function, toy):
    with pytest.raises(MetricError) as error:
        bind(toy, as_metric(function), some_ids(2, 4))
    assert says(
        error, "the metric <lambda> returned shape [", "for 2 rows of logits", "it must return one number a row"
    )


def test_a_function_cannot_know_where_padded_prompts_end(toy):
    with pytest.raises(MetricError) as error:
        bind(toy, as_metric(lambda z: z[:, -1, 0]), PROMPTS)
    assert says(
        error,
        "a function of the logits",
        "prompts of [6, 3, 5] tokens",
        "give prompts of one length, or use rs.logit_diff",
    )


@pytest.mark.parametrize("thing", ["loss", rs.loss, 3])
def test_what_is_not_a_metric(thing):
    with unchecked(), pytest.raises(MetricError) as error:
        as_metric(thing)
    assert says(error, repr(thing), "is not a metric", "give rs.logit_diff(...)")
