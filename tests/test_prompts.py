"""Pairs of prompts against the tokenizer's own ids and offsets, and against the plain Hugging Face model."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from stream.test_read import says, unchecked
from tiny import SUPPORTED, tokenizer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

import resstream as rs
from resstream.errors import PromptError
from resstream.prompts import drawing
from resstream.prompts.words import EVENTS, LASTING

TEXTS = {
    "indirect_object": lambda model, **asked: rs.prompts.indirect_object(model, **asked),
    "ABBA": lambda model, **asked: rs.prompts.indirect_object(model, order="ABBA", **asked),
    "BABA": lambda model, **asked: rs.prompts.indirect_object(model, order="BABA", **asked),
    "names": lambda model, **asked: rs.prompts.indirect_object(model, corrupt="names", **asked),
    "capital": lambda model, **asked: rs.prompts.facts(model, **asked),
    "language": lambda model, **asked: rs.prompts.facts(model, relation="language", **asked),
    "continent": lambda model, **asked: rs.prompts.facts(model, relation="continent", **asked),
    "opposite": lambda model, **asked: rs.prompts.facts(model, relation="opposite", **asked),
    "greater_than": lambda model, **asked: rs.prompts.greater_than(model, **asked),
    "agreement": lambda model, **asked: rs.prompts.agreement(model, **asked),
}
EVERY = {**TEXTS, "induction": lambda model, **asked: rs.prompts.induction(model, **asked)}
COUNT = 12


@pytest.fixture(scope="module")
def drawn(smollm2):
    """Each kind of pairs, drawn once."""
    return {name: make(smollm2, count=COUNT, seed=0) for name, make in EVERY.items()}


def ids_of(prompts):
    """The token ids of each prompt, from the prompts alone."""
    return [ids[:length].tolist() for ids, length in zip(prompts.ids, prompts.lengths, strict=True)]


# What is drawn


@pytest.mark.parametrize("name", EVERY)
def test_the_seed_decides(name, smollm2, drawn):
    again, more, other = (
        EVERY[name](smollm2, count=n, seed=seed) for n, seed in ((COUNT, 0), (COUNT + 8, 0), (COUNT, 1))
    )
    assert repr(again) == repr(drawn[name])
    if name == "induction":
        assert torch.equal(again.clean.ids, drawn[name].clean.ids)
        assert torch.equal(more.clean.ids[:COUNT], again.clean.ids), (
            "asking for more leaves the first ones as they were"
        )
        assert not torch.equal(other.clean.ids, again.clean.ids)
    else:
        assert again == drawn[name]
        assert more[:COUNT] == again, "asking for more leaves the first ones as they were"
        assert other.clean != again.clean


@pytest.mark.parametrize("name", TEXTS)
def test_no_prompt_is_drawn_twice(name, drawn):
    assert len(set(drawn[name].clean)) == len(drawn[name]) == COUNT


def pairs_align(model, pairs, changed):
    """Both prompts have as many tokens, and differ at none but the slots that are changed."""
    for clean, corrupted, slots in zip(pairs.clean, pairs.corrupted, pairs.slots, strict=True):
        one, other = (model.tokenizer(text)["input_ids"] for text in (clean, corrupted))
        assert len(one) == len(other)
        apart = {at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}
        assert apart
        assert apart <= {at for slot in changed for at in slots[slot]}


CHANGED = {"indirect_object": {"S2"}, "ABBA": {"S2"}, "BABA": {"S2"}, "names": {"IO", "S1", "S2"}}


@pytest.mark.parametrize("name", TEXTS)
def test_pairs_align(name, smollm2, drawn):
    pairs_align(smollm2, drawn[name], {"start"} if name == "greater_than" else CHANGED.get(name, {"subject"}))


def answers_are_the_next_token(model, pairs):
    """Each answer, put after its prompts, gives their ids and one more, which is the one that the metric scores."""
    for row in range(len(pairs)):
        right, wrong = (
            each if isinstance(each, int) else model.tokenizer(each)["input_ids"][0]
            for each in (pairs.answers[row], pairs.against[row])
        )
        assert right != wrong
        for prompt in (pairs.clean[row], pairs.corrupted[row]):
            ids = model.tokenizer(prompt)["input_ids"]
            for answer, token in ((pairs.answers[row], right), (pairs.against[row], wrong)):
                assert model.tokenizer(f"{prompt}{answer}")["input_ids"] == [*ids, token]


@pytest.mark.parametrize("name", TEXTS)
def test_answers_are_the_next_token(name, smollm2, drawn):
    answers_are_the_next_token(smollm2, drawn[name])


def slots_are_where_the_offsets_say(model, pairs, words_of):
    """The tokens of each slot are those whose offsets overlap its words, in both prompts."""
    for row in range(len(pairs)):
        for prompt in (pairs.clean[row], pairs.corrupted[row]):
            offsets = model.tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
            for slot, (start, end) in words_of(prompt).items():
                expected = tuple(n for n, (first, stop) in enumerate(offsets) if first < end and start < stop)
                assert pairs.slots[row][slot] == expected


def meeting(prompt):
    """Where the names stand in a prompt: the two that are introduced, and the one that comes again."""
    names = [match.span() for match in re.finditer(r"(?<= )[A-Z][a-z]+(?= )", prompt)]
    names = [span for span in names if prompt[slice(*span)] != "In"]
    return dict(zip(("S1", "S2"), (names[0], names[2]), strict=True)), {"IO": names[0], "S2": names[2]}


def fact(prompt):
    """Where the country stands in a prompt."""
    return {"subject": re.search(r"(?<= )[A-Z][a-z]+", prompt).span()}


SPANS = {
    "ABBA": lambda prompt: meeting(prompt)[1],
    "BABA": lambda prompt: meeting(prompt)[0],
    "capital": fact,
    "continent": fact,
    "greater_than": lambda prompt: {
        "start": re.search(r"\d{4}", prompt).span(),
        "century": (len(prompt) - 2, len(prompt)),
    },
}


@pytest.mark.parametrize("name", SPANS)
def test_slots_are_where_the_offsets_say(name, smollm2, drawn):
    slots_are_where_the_offsets_say(smollm2, drawn[name], SPANS[name])


def cities(model, count=3):
    """Cities of one to three tokens in a text, and as answers to it."""
    rows = [dict(zip(("land", "city"), row, strict=True)) for row in LANDS]
    return rs.prompts.template(
        model,
        "I left {here.city} for a city in {there.land}, namely",
        {"here": rows, "there": rows, "where": rows, "other": rows},
        corrupt={"here.city": "where.city"},
        answer=" {there.city}",
        against=" {other.city}",
        count=count,
    )


LANDS = (("Turkey", "Ankara"), ("Cuba", "Havana"), ("Peru", "Lima"), ("Qatar", "Doha"), ("France", "Paris"))
HELD = {
    "unaligned": lambda model, pairs: pairs_align(model, pairs, {"here"}),
    "answers": answers_are_the_next_token,
    "slots": lambda model, pairs: slots_are_where_the_offsets_say(
        model, pairs, lambda prompt: {"here": re.search("(?<=left )[A-Z][a-z]+", prompt).span()}
    ),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_pairs_of_longer_words_hold_all_this(held, smollm2):
    held(smollm2, cities(smollm2))


@pytest.mark.parametrize("planted", HELD)
def test_pairs_that_are_off_are_noticed(planted, smollm2, monkeypatch):
    """The twin of the tests above."""
    if planted == "unaligned":
        monkeypatch.setattr(drawing, "_placed", lambda model, side: (1, dict.fromkeys(side.slots, (0,))))
    elif planted == "answers":
        first = lambda model, prompt, answer, failed: model.tokenizer(answer)["input_ids"][0]  # noqa: E731
        monkeypatch.setattr(drawing, "_next_token", first)
    else:
        real = drawing._placed

        def late(model, side):
            width, placed = real(model, side)
            return width, {slot: tuple(at + 1 for at in positions) for slot, positions in placed.items()}

        monkeypatch.setattr(drawing, "_placed", late)
    with pytest.raises(AssertionError):
        HELD[planted](smollm2, cities(smollm2, count=12 if planted != "slots" else 3))


# What the model makes of them


def differences(model, prompts, answers, against):
    """Logit of the answer minus logit against it, from the plain model, prompts of one length at a time."""
    texts = [model.tokenizer(each)["input_ids"] for each in prompts] if isinstance(prompts, tuple) else ids_of(prompts)
    right, wrong = (
        [each if isinstance(each, int) else model.tokenizer(each)["input_ids"][0] for each in side]
        for side in (answers, against)
    )
    found = torch.empty(len(texts))
    for length in {len(ids) for ids in texts}:
        rows = [row for row, ids in enumerate(texts) if len(ids) == length]
        with torch.no_grad():
            ids = torch.tensor([texts[row] for row in rows])
            logits = model.hf_model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, 0]
        found[rows] = torch.stack([z[right[row]] - z[wrong[row]] for row, z in zip(rows, logits, strict=True)])
    return found


@pytest.fixture(scope="module")
def preferences(smollm2, drawn):
    """These differences after clean and after corrupted prompts, for each kind of pairs."""
    return {
        name: [differences(smollm2, side, pairs.answers, pairs.against) for side in (pairs.clean, pairs.corrupted)]
        for name, pairs in drawn.items()
        if name in PREFERRED
    }


# The share of pairs in which the model prefers the answer, and in which the corrupted prompt turns that round.
PREFERRED = {
    "indirect_object": (0.95, 0.9),
    "names": (0.95, None),
    "capital": (0.95, 0.95),
    "language": (0.9, 0.8),
    "continent": (0.9, 0.9),
    "opposite": (0.9, 0.9),
    "greater_than": (0.9, None),
    "agreement": (0.9, 0.9),
    "induction": (0.95, 0.9),
}


def the_model_prefers(name, clean, corrupted):
    kept, turned = PREFERRED[name]
    assert float((clean > 0).float().mean()) >= kept
    assert float((clean > corrupted).float().mean()) >= 0.95
    assert turned is None or float((corrupted < 0).float().mean()) >= turned


@pytest.mark.parametrize("name", PREFERRED)
def test_the_model_prefers_the_answer_until_the_prompt_is_corrupted(name, preferences):
    the_model_prefers(name, *preferences[name])


@pytest.mark.parametrize("name", PREFERRED)
def test_answers_that_are_swapped_are_noticed(name, preferences):
    """The twin of the test above."""
    clean, corrupted = preferences[name]
    with pytest.raises(AssertionError):
        the_model_prefers(name, -clean, -corrupted)


@pytest.mark.parametrize("name", [name for name, (_, turned) in PREFERRED.items() if turned])
def test_a_corruption_that_does_nothing_is_noticed(name, preferences):
    """The same."""
    with pytest.raises(AssertionError):
        the_model_prefers(name, preferences[name][0], preferences[name][0])


@pytest.mark.parametrize("name", ["indirect_object", "greater_than", "induction"])
def test_the_metric_is_that_difference(name, smollm2, drawn, preferences):
    pairs = drawn[name][:6]
    tokens = smollm2.tokenize(pairs.clean if name == "induction" else list(pairs.clean))
    with torch.no_grad():
        final = smollm2.trunk(tokens).run()
        found = pairs.metric.bind(smollm2, tokens, final)(final, range(6))
    assert float((found - preferences[name][0][:6]).abs().max()) < 2e-4


def test_pairs_are_what_a_measure_takes(smollm2, drawn, preferences):
    pairs = drawn["indirect_object"][:2]
    found = rs.ablate_layers(smollm2, list(pairs.clean), layers=[29], metric=pairs.metric)
    assert found.data.base.values == pytest.approx(preferences["indirect_object"][0][:2].numpy(), abs=2e-4)
    whole = rs.read(smollm2, list(pairs.clean), sites="final")["final"]
    kept = rs.read(smollm2, list(pairs.clean), sites="final", positions=pairs.positions("S2"))["final"]
    places = [at for (at,) in pairs.positions("S2").positions]
    assert torch.equal(kept[:, 0], whole[[0, 1], places])


# What each kind is about


def test_orders_of_names(drawn):
    for name, first, second in (("ABBA", "IO", "S1"), ("BABA", "S1", "IO")):
        assert all(slots[first] < slots[second] < slots["S2"] for slots in drawn[name].slots)
    both = {slots["IO"] < slots["S1"] for slots in drawn["indirect_object"].slots}
    assert both == {True, False}


def test_corrupted_names(smollm2, drawn):
    """A swap names the other person again; other names are all new."""
    for name, pairs in ((name, drawn[name]) for name in ("indirect_object", "names")):
        for row in range(len(pairs)):
            words = {}
            for side, prompt in (("clean", pairs.clean[row]), ("corrupted", pairs.corrupted[row])):
                strings = smollm2.tokenize(prompt).strings[0]
                words[side] = {slot: strings[pairs.slots[row][slot][0]] for slot in ("IO", "S1", "S2")}
            clean, corrupted = words["clean"], words["corrupted"]
            assert clean["IO"] == pairs.answers[row]
            assert clean["S1"] == clean["S2"] == pairs.against[row]
            if name == "names":
                assert len({*clean.values(), *corrupted.values()}) == 5
            else:
                assert corrupted == {**clean, "S2": clean["IO"]}


def test_years_are_later_and_earlier(drawn):
    pairs = drawn["greater_than"]
    for row in range(len(pairs)):
        (start,), (low,) = (re.findall(r"\d{4}", prompt) for prompt in (pairs.clean[row], pairs.corrupted[row]))
        assert low == start[:2] + "01"
        assert pairs.clean[row].endswith(start[:2])
        assert int(low[2]) < int(pairs.against[row]) < int(start[2]) < int(pairs.answers[row])


def test_years_whose_halves_are_tokens():
    """Where the last two digits of a year are one token, they are the answer."""
    words = sorted({word for text in (*LASTING, *EVENTS) for word in re.findall(r"[A-Za-z]+", text)})
    vocab = {each: n for n, each in enumerate([*(f"{n:02d}" for n in range(100)), *words, "<unk>"])}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d{2}"), "isolated")]
    )
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    model = rs.load(SUPPORTED["llama"](vocab_size=len(vocab)), name="toy", tokenizer=own)
    pairs = rs.prompts.greater_than(model, count=40, seed=0)
    for clean, answer, against in zip(pairs.clean, pairs.answers, pairs.against, strict=True):
        (start,) = re.findall(r"\d{4}", clean)
        assert 1 < int(against) < int(start[2:]) < int(answer)
        assert len(answer) == len(against) == 2
        assert model.tokenize(f"{clean}{answer}").strings[0][-2:] == (start[:2], answer)


def test_verbs_agree_with_the_subject(smollm2, drawn):
    singular, irregular = {" is", " was", " has"}, {"children", "men", "women"}
    many = lambda word: word in irregular or word.endswith("s")  # noqa: E731
    pairs = drawn["agreement"]
    numbers = set()
    for row in range(len(pairs)):
        subject, changed = (prompt.split()[1] for prompt in (pairs.clean[row], pairs.corrupted[row]))
        other = pairs.clean[row].split()[-1]
        assert many(subject) != many(changed)
        assert (pairs.answers[row] in singular) != many(subject)
        assert (pairs.against[row] in singular) == many(subject)
        assert pairs.corrupted[row].split()[-1] == other
        numbers.add((many(subject), many(other)))
    assert len(numbers) == 4, "the noun in between is of either number"


def test_random_tokens_repeat(smollm2):
    pairs = rs.prompts.induction(smollm2, count=5, seed=3, length=9)
    special = {*smollm2.tokenizer.all_special_ids, *smollm2.tokenizer.added_tokens_decoder}
    for row, (clean, corrupted) in enumerate(zip(ids_of(pairs.clean), ids_of(pairs.corrupted), strict=True)):
        first, again = clean[:9], clean[9:]
        assert len({*first, pairs.against[row]}) == 10
        assert not special & {*first, pairs.against[row]}
        assert again == first[: len(again)]
        assert pairs.answers[row] == first[len(again)]
        (follower,) = pairs.slots[row]["follower"]
        assert [at for at in range(len(clean)) if clean[at] != corrupted[at]] == [follower]
        assert (clean[follower], corrupted[follower]) == (pairs.answers[row], pairs.against[row])
        assert pairs.slots[row]["earlier"] == (follower - 1,)
        assert clean[follower - 1] == clean[-1]
        assert pairs.slots[row]["repeat"] == tuple(range(9, len(clean)))


def test_random_tokens_of_other_models():
    """Without a tokenizer every id will do; what a tokenizer puts before a text stays there."""
    mute = rs.load(SUPPORTED["llama"](), name="mute")
    assert rs.prompts.induction(mute, count=3, length=4).clean.lengths == (7, 7, 7)
    own = tokenizer()
    own.bos_token = "w0"
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(single="w0 $A", special_tokens=[("w0", 0)])
    model = rs.load(SUPPORTED["llama"](), name="toy", tokenizer=own)
    pairs = rs.prompts.induction(model, count=50, length=4)
    assert pairs.clean.ids[:, 0].tolist() == [0] * 50
    assert not (pairs.clean.ids[:, 1:] == 0).any()
    assert pairs.slots[0] == {"earlier": (3,), "follower": (4,), "repeat": (5, 6, 7)}
    assert len({tuple(row) for row in pairs.clean.ids.tolist()}) == 50


# Templates of one's own

YOUNG = [{"name": name, "young": young} for name, young in (("w1", "w11"), ("w2", "w12"), ("w3", "w13"), ("w4", "w14"))]
ASK = {"corrupt": {"animal.name": "other.name"}, "answer": " {animal.young}", "against": " {other.young}"}


@pytest.fixture(scope="module")
def toy():
    return rs.load(SUPPORTED["llama"](), name="toy", tokenizer=tokenizer())


def test_a_template_of_ones_own(toy):
    texts = ["w20 {animal.name} w21", "w20 w22 {animal.name} w21 {again.name}"]
    pairs = rs.prompts.template(
        toy, texts, {"animal": YOUNG, "other": YOUNG, "again": "animal"}, **ASK, count=8, seed=0, name="young"
    )
    expected = set()
    for row in YOUNG:
        expected |= {f"w20 {row['name']} w21", f"w20 w22 {row['name']} w21 {row['name']}"}
    assert set(pairs.clean) == expected
    young = {row["name"]: row["young"] for row in YOUNG}
    for clean, corrupted, answer, against, slots in zip(
        pairs.clean, pairs.corrupted, pairs.answers, pairs.against, pairs.slots, strict=True
    ):
        (at,) = slots["animal"]
        before, after = clean.split(), corrupted.split()
        assert before[at] != after[at]
        assert before[:at] + before[at + 1 :] == after[:at] + after[at + 1 :], "{again} is another slot and stays"
        assert (answer.strip(), against.strip()) == (young[before[at]], young[after[at]])
        assert ("again" in slots) == (len(before) == 5)


def test_answers_that_alone_are_other_tokens_are_given_as_ids():
    """In the middle of a word, "a" is one token; alone, this tokenizer begins it with a space."""
    vocab = {letter: number for number, letter in enumerate("zabc▁?")}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    letters = pre_tokenizers.Split(Regex("."), "isolated")
    plain.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always"), letters])
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?")
    model = rs.load(SUPPORTED["llama"](), name="toy", tokenizer=own)
    assert own("a")["input_ids"] == [vocab["▁"], vocab["a"]]
    fillers = {"one": ["a", "b", "c"], "other": ["a", "b", "c"]}
    pairs = rs.prompts.template(
        model, "z{one}", fillers, corrupt={"one": "other"}, answer="{one}", against="{other}", count=3
    )
    for clean, corrupted, answer, against in zip(
        pairs.clean, pairs.corrupted, pairs.answers, pairs.against, strict=True
    ):
        assert (answer, against) == (vocab[clean[1]], vocab[corrupted[1]])
    with torch.no_grad():
        tokens = model.tokenize(list(pairs.clean))
        final = model.trunk(tokens).run()
        assert pairs.metric.bind(model, tokens, final)(final, range(3)).shape == (3,)


def test_pairs_that_do_not_align_are_left_out(smollm2):
    """Words of two tokens pair with words of two tokens only, and answers of two are not used at all."""
    words = ["Paris", "Rome", "Bangkok", "Ankara", "Jakarta", "Beirut"]
    sizes = {word: len(smollm2.tokenizer(f" {word}")["input_ids"]) for word in words}
    assert sorted(sizes.values()) == [1, 1, 2, 2, 2, 3]
    fillers = {"city": words, "other": words}
    asked = {"corrupt": {"city": "other"}, "answer": " of", "against": " in"}
    pairs = rs.prompts.template(smollm2, "The mayor of {city} is", fillers, **asked, count=5)
    assert set(pairs.clean) == {f"The mayor of {word} is" for word in words if word != "Beirut"}
    for clean, corrupted in zip(pairs.clean, pairs.corrupted, strict=True):
        assert sizes[clean.split()[3]] == sizes[corrupted.split()[3]]
    with pytest.raises(PromptError) as error:
        rs.prompts.template(smollm2, "The mayor of {city} is", fillers, **asked, count=6)
    assert says(error, "only 5 template pairs fit the tokenizer of smollm2", "count=6; ask for count=5 or fewer")
    assert says(error, "left out were", "'Beirut' with '", "(3 tokens with ")


# Pairs


def test_pairs_are_cut(drawn):
    pairs = drawn["capital"]
    assert (len(pairs), len(pairs[2]), len(pairs[4:9]), len(pairs[[5, 1]])) == (COUNT, 1, 5, 2)
    assert pairs[[5, 1]].clean == (pairs.clean[5], pairs.clean[1])
    assert pairs[-1].answers == pairs.answers[-1:]
    assert [one.clean[0] for one in pairs] == list(pairs.clean)
    assert pairs[:3].metric == rs.logit_diff(pairs.answers[:3], pairs.against[:3])
    assert pairs[[5, 1]].positions("subject").positions == (pairs.slots[5]["subject"], pairs.slots[1]["subject"])
    ids = drawn["induction"]
    assert torch.equal(ids[[5, 1]].corrupted.ids, ids.corrupted.ids[[5, 1]])
    for wrong in (COUNT, -COUNT - 1, [0, COUNT]):
        with pytest.raises(IndexError):
            pairs[wrong]


def test_pairs_are_printed(drawn):
    pairs = drawn["capital"]
    assert repr(pairs).splitlines() == [
        f"Pairs(capital of smollm2: {COUNT} pairs)",
        f"  clean      {pairs.clean[0]}",
        f"  corrupted  {pairs.corrupted[0]}",
        f"  answer     {pairs.answers[0]!r}, against {pairs.against[0]!r}, and {COUNT - 1} more",
    ]
    assert repr(pairs[:0]) == "Pairs(capital of smollm2: 0 pairs)"
    assert repr(pairs[0]).endswith(f"against {pairs.against[0]!r}")


# Errors


@pytest.mark.parametrize("name", EVERY)
def test_a_count_below_one(name, smollm2):
    with pytest.raises(PromptError, match=r"count=0 asks for no pairs; give 1 or more, such as count=32"):
        EVERY[name](smollm2, count=0)


def test_more_than_there_are(smollm2, toy):
    with pytest.raises(PromptError) as error:
        rs.prompts.facts(smollm2, count=1000)
    assert says(
        error, "only 102 capital pairs fit the tokenizer of smollm2", "but count=1000; ask for count=102 or fewer"
    )
    assert says(error, "left out were '", "' Ankara' ([' Ank', 'ara'] after '")
    assert len(rs.prompts.facts(smollm2, count=102)) == 102
    with pytest.raises(PromptError) as error:
        rs.prompts.induction(toy, count=5, length=63)
    assert says(
        error, "only 0 induction pairs of 63 different tokens", "63 ordinary tokens of toy", "length from 2 to 62"
    )
    with pytest.raises(PromptError, match=f"only {63 * 62 * 61} induction pairs"):
        rs.prompts.induction(toy, count=10**9, length=2)


def test_words_that_never_fit(toy):
    """A tokenizer that knows none of the words: said at once, and with some of the words."""
    with pytest.raises(PromptError) as error:
        rs.prompts.indirect_object(toy)
    assert says(error, "only 0 indirect_object pairs fit the tokenizer of toy", "give words that are one token each")


def test_a_search_that_finds_nothing_ends(toy, monkeypatch):
    monkeypatch.setattr(drawing, "_TRIES", 18)
    words = [f"w{n}" for n in range(20)]
    with pytest.raises(PromptError) as error:
        rs.prompts.template(
            toy,
            "w30 {a} {b}",
            {"a": words, "b": words, "long": ["w1 w2"]},
            corrupt={"a": "long"},
            answer=" w40",
            against=" w41",
            count=2,
        )
    assert says(error, "only 0 template pairs", "among the first 58 of 400 ways to fill them", "(1 tokens with 2)")


def test_a_model_without_a_tokenizer():
    mute = rs.load(SUPPORTED["llama"](), name="mute")
    with pytest.raises(PromptError) as error:
        rs.prompts.facts(mute)
    assert says(
        error, "mute was loaded without a tokenizer", "rs.load(model, tokenizer=...), or use rs.prompts.induction"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: rs.prompts.indirect_object(model, order="AABB"),
            r'order="AABB" is not known.*\'ABBA\', \'BABA\'',
        ),
        (lambda model: rs.prompts.indirect_object(model, corrupt="noise"), r'corrupt="noise" is not known.*\'swap\''),
        (lambda model: rs.prompts.facts(model, relation="sport"), r'relation="sport" is not known.*\'capital\''),
    ],
)
def test_unknown_words(make, message, toy):
    with unchecked(), pytest.raises(PromptError, match=message):
        make(toy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text": "w20 {beast}"},
            r"nothing to corrupt: 'w20 \{beast\}' has no slot 'animal.name'; name one of 'beast'",
        ),
        ({"corrupt": {}}, r"nothing to corrupt: .* name one of 'animal.name'"),
        (
            {"corrupt": {"animal.name": "otter.name"}},
            r"no words for the slot \{otter\} .*there are some for 'animal', 'other'",
        ),
        (
            {"answer": " {animal.old}"},
            r"the slot \{animal.old\} cannot be filled with \{'name': 'w1'.* mappings such as",
        ),
        ({"answer": " {animal}"}, r"the slot \{animal\} cannot be filled with \{'name': 'w1'"),
        ({"fillers": {"animal": ["w1"], "other": YOUNG}}, r"the slot \{animal.name\} cannot be filled with 'w1'"),
        (
            {"fillers": {"animal": [], "other": YOUNG}},
            r"the slot \{animal.name\} cannot be filled with \[\]; give at least",
        ),
        (
            {"fillers": {"animal": "other", "other": "animal"}},
            r"the slot \{other\} repeats 'animal', which has no words",
        ),
        (
            {"fillers": {"animal": "beast", "other": YOUNG}},
            r"the slot \{animal\} repeats 'beast', which has no words of",
        ),
    ],
)
def test_templates_that_cannot_be_filled(changes, message, toy):
    asked = {"text": "w20 {animal.name}", "fillers": {"animal": YOUNG, "other": YOUNG}, **ASK, **changes}
    with pytest.raises(PromptError, match=message):
        rs.prompts.template(toy, asked.pop("text"), asked.pop("fillers"), **asked)


def test_a_slot_that_there_is_not(drawn):
    with pytest.raises(PromptError, match="no slot 'S3' in pair 0 of indirect_object, which has 'IO', 'S1'"):
        drawn["indirect_object"].positions("S3")


def test_a_tokenizer_that_reads_another_text():
    """Without offsets the slots are looked for in the decoded text, which has to hold the prompt."""
    vocab = {**{f"w{n}": n for n in range(63)}, "<unk>": 63}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    class Slow(transformers.PreTrainedTokenizerFast):
        is_fast = False

    own = Slow(tokenizer_object=plain, unk_token="<unk>")
    model = rs.load(SUPPORTED["llama"](), name="toy", tokenizer=own)
    fillers = {"animal": YOUNG, "other": YOUNG}
    pairs = rs.prompts.template(model, "w20 {animal.name} w21", fillers, **ASK, count=4)
    assert [slots["animal"] for slots in pairs.slots] == [(1,)] * 4
    with pytest.raises(PromptError, match=r"the tokenizer of toy reads 'w20  w\d w21' as 'w20 w\d w21'"):
        rs.prompts.template(model, "w20  {animal.name} w21", fillers, **ASK, count=4)
