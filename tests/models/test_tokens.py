"""Prompts become the tokenizer's own ids, padded on the right; nothing is added, cut or moved silently."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from stream.test_read import unchecked
from tiny import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

import resstream as rs
from resstream.errors import PromptError
from resstream.models.text import Text
from resstream.models.tokens import Tokens, join, token_string, tokenize


def read(prompts, own=None, max_positions=8):
    return tokenize(prompts, tokenizer=own, vocab_size=64, max_positions=max_positions, model="toy")


def refused(message, *args, **kwargs):
    with pytest.raises(PromptError, match=message):
        read(*args, **kwargs)


# Text


def test_a_text_is_one_prompt():
    tokens = read("w3 w1 w4", tokenizer())
    assert tokens.ids.tolist() == [[3, 1, 4]]
    assert tokens.ids.dtype == torch.long
    assert (tokens.lengths, tokens.strings) == ((3,), (("w3", "w1", "w4"),))
    assert (len(tokens), tokens.width, tokens.padded) == (1, 3, False)


def test_texts_of_unequal_length_are_padded_on_the_right_with_their_own_last_token():
    tokens = read(["w3 w1 w4", "w5"], tokenizer())
    assert tokens.ids.tolist() == [[3, 1, 4], [5, 5, 5]]
    assert tokens.lengths == (3, 1)
    assert tokens.strings == (("w3", "w1", "w4"), ("w5",))
    assert tokens.mask.tolist() == [[True, True, True], [True, False, False]]
    assert tokens.padded


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizers_own_padding_is_never_used(side):
    own = tokenizer()
    own.padding_side, own.pad_token = side, "w0"
    assert read(["w3 w1 w4", "w5"], own).ids.tolist() == [[3, 1, 4], [5, 5, 5]]


def test_nothing_is_prepended_where_the_tokenizer_adds_nothing():
    own = tokenizer()
    own.bos_token = own.eos_token = "w0"
    assert read("w3 w1", own).ids.tolist() == [[3, 1]]


def test_what_the_tokenizer_adds_is_kept():
    own = tokenizer()
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="w0 $A w2", special_tokens=[("w0", 0), ("w2", 2)]
    )
    assert read("w3 w1", own).ids.tolist() == [[0, 3, 1, 2]]


def test_the_embedded_models_tokens_are_its_tokenizers_own(smollm2):
    prompt = "The Eiffel Tower is in the city of"
    tokens = smollm2.tokenize(prompt)
    assert tokens.ids.tolist() == [smollm2.tokenizer(prompt)["input_ids"]]
    assert "".join(tokens.strings[0]) == prompt


def test_text_without_a_tokenizer_is_refused():
    refused(r"toy was loaded without a tokenizer, .* rs\.load\(model, tokenizer=\.\.\.\)", "w3")


def test_empty_prompts_are_refused():
    refused("prompt 0 is empty: toy needs at least one token", "", tokenizer())
    refused("prompt 1 is empty", ["w3", ""], tokenizer())
    refused("no prompts were given", [], tokenizer())
    refused("prompt 0 is empty", torch.zeros(1, 0, dtype=torch.long))
    refused("no prompts were given", torch.zeros(0, 5, dtype=torch.long))
    refused("prompt 0 is empty", {"input_ids": torch.zeros(1, 0).long(), "attention_mask": torch.zeros(1, 0).long()})
    refused(
        "prompt 1 is empty", {"input_ids": torch.ones(2, 2).long(), "attention_mask": torch.tensor([[1, 1], [0, 0]])}
    )


def test_prompts_longer_than_the_context_are_refused_not_cut():
    eight, nine = " ".join(["w1"] * 8), " ".join(["w1"] * 9)
    assert read(eight, tokenizer()).width == 8
    refused("prompt 0 has 9 tokens, but toy reads at most 8; shorten the prompt", nine, tokenizer())
    refused("prompt 1 has 9 tokens", ["w1", nine], tokenizer())
    assert read(nine, tokenizer(), max_positions=None).width == 9


def test_a_prompt_that_ends_in_a_space_is_warned_of(smollm2):
    """Case 22: the space belongs to the next word's token."""
    with pytest.warns(UserWarning, match="prompt 1 ends in a space, 'is in ': most tokenizers put the space before"):
        tokens = smollm2.tokenize(["The Eiffel Tower is in", "is in "])
    assert tokens.ids[1, : tokens.lengths[1]].tolist() == smollm2.tokenizer("is in ")["input_ids"], "nothing is cut"
    for text in ("is in", "is in\n", " is in"):
        smollm2.tokenize(text)


# Token ids


def test_token_ids_are_taken_as_they_are():
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]], dtype=torch.int32)
    tokens = read(ids)
    assert torch.equal(tokens.ids, ids.long())
    assert tokens.lengths == (3, 3)
    assert tokens.strings == (("3", "1", "4"), ("1", "5", "9")), "without a tokenizer, ids name themselves"
    assert read(torch.tensor([3, 1, 4])).ids.tolist() == [[3, 1, 4]]
    assert read(tokens) is tokens


def test_what_was_given_is_not_shared():
    ids = torch.tensor([[3, 1, 4]])
    tokens = read(ids)
    ids[0, 0] = 9
    assert tokens.ids.tolist() == [[3, 1, 4]]


@pytest.mark.parametrize(("wrong", "named"), [([3, 64], 64), ([-1, 3], -1), ([3, -7, 99], -7)])
def test_ids_out_of_range_are_refused_by_name(wrong, named):
    refused(f"prompt 0 holds token id {named}, but toy knows ids 0 to 63", torch.tensor([wrong]))


@pytest.mark.parametrize("wrong", [torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 1, 3).long()])
def test_tensors_that_are_no_ids_are_refused(wrong):
    refused(r"token ids are whole numbers of shape \[prompt, position\]; found torch\.", wrong)
    refused("token ids are whole numbers", torch.tensor(3))


def test_a_mask_finds_the_padding_on_either_side():
    ids = torch.tensor([[3, 1, 4], [5, 9, 2]])
    right = read({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])})
    left = read({"input_ids": ids.flip(0), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])})
    middle = read({"input_ids": ids, "attention_mask": torch.tensor([[True, True, True], [False, True, False]])})
    assert right.ids.tolist() == [[3, 1, 4], [5, 9, 9]]
    assert (right.lengths, right.strings[1]) == ((3, 2), ("5", "9"))
    assert left.ids.tolist() == [[9, 2, 2], [3, 1, 4]]
    assert middle.ids.tolist() == [[3, 1, 4], [9, 9, 9]]
    assert read({"input_ids": ids}).lengths == (3, 3)
    assert read({"input_ids": ids[0], "attention_mask": torch.tensor([0, 1, 1])}).ids.tolist() == [[1, 4]]


def test_columns_that_are_padding_everywhere_are_dropped():
    tokens = read({"input_ids": torch.tensor([[7, 7, 3], [7, 7, 5]]), "attention_mask": torch.tensor([[0, 0, 1]] * 2)})
    assert tokens.ids.tolist() == [[3], [5]]


def test_what_a_tokenizer_returns_is_read():
    own = tokenizer()
    own.pad_token = "w0"
    batch = own(["w3 w1 w4", "w5"], return_tensors="pt", padding=True)
    assert read(batch).ids.tolist() == [[3, 1, 4], [5, 5, 5]]
    refused('found list and list; call the tokenizer with return_tensors="pt"', own(["w3 w1 w4", "w5"]))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1], [1, 0, 1]], "attention_mask of prompt 1 has a gap; real tokens must stand together"),
        ([[1, 0, 1], [1, 1, 1]], "attention_mask of prompt 0 has a gap"),
        ([[1, 1], [1, 1]], r"attention_mask has shape \[2, 2\], but the token ids have \[2, 3\]"),
        ([[0.0, 0.0, -1e9], [0.0, 0.0, 0.0]], "attention_mask must be 1 at real tokens and 0 at padding"),
        ([[1, 2, 0], [1, 1, 1]], "attention_mask must be 1 at real tokens and 0 at padding"),
    ],
)
def test_masks_that_say_something_else_are_refused(mask, message):
    refused(message, {"input_ids": torch.tensor([[3, 1, 4], [5, 9, 2]]), "attention_mask": torch.tensor(mask)})


def test_mappings_without_ids_are_refused():
    refused(r"needs 'input_ids'; found \['ids'\]", {"ids": torch.tensor([[3]])})


# Positions


@pytest.fixture
def unequal():
    return read(["w3 w1 w4 w2", "w5 w6"], tokenizer())


@pytest.mark.parametrize(
    ("positions", "chosen"),
    [
        (None, [[1, 1, 1, 1], [1, 1, 0, 0]]),
        (0, [[1, 0, 0, 0], [1, 0, 0, 0]]),
        (-1, [[0, 0, 0, 1], [0, 1, 0, 0]]),
        (-2, [[0, 0, 1, 0], [1, 0, 0, 0]]),
        ([0, -1], [[1, 0, 0, 1], [1, 1, 0, 0]]),
        (range(2), [[1, 1, 0, 0], [1, 1, 0, 0]]),
        ([], [[0, 0, 0, 0], [0, 0, 0, 0]]),
        (slice(1, None), [[0, 1, 1, 1], [0, 1, 0, 0]]),
        (slice(None, -1), [[1, 1, 1, 0], [1, 0, 0, 0]]),
        (slice(-3, None), [[0, 1, 1, 1], [1, 1, 0, 0]]),
        (slice(2, None), [[0, 0, 1, 1], [0, 0, 0, 0]]),
        (slice(None, None, 2), [[1, 0, 1, 0], [1, 0, 0, 0]]),
    ],
)
def test_positions_count_from_each_prompts_own_ends(unequal, positions, chosen):
    assert unequal.at(positions).int().tolist() == chosen


@pytest.mark.parametrize(("positions", "named"), [(2, 2), (-3, -3), ([0, 3], 3)])
def test_positions_that_a_prompt_does_not_have_are_refused(unequal, positions, named):
    message = rf"no position {named}: prompt 1 has 2 tokens \['w5', 'w6'\]; use -2 to 1"
    with pytest.raises(PromptError, match=message):
        unequal.at(positions)


def test_rows_are_taken_in_any_order_and_repeatedly(unequal):
    taken = unequal.take([1, 0, 1])
    assert taken.ids.tolist() == [[5, 6, 6, 6], [3, 1, 4, 2], [5, 6, 6, 6]]
    assert (taken.lengths, taken.strings[2]) == ((2, 4, 2), ("w5", "w6"))


def test_batches_join(unequal):
    joined = join(read("w7", tokenizer()), unequal)
    assert joined.ids.tolist() == [[7, 7, 7, 7], [3, 1, 4, 2], [5, 6, 6, 6]]
    assert joined.lengths == (1, 4, 2)
    assert joined.strings[0] == ("w7",)


@pytest.mark.parametrize("positions", [rs.PerPrompt(((0, -1), (1,))), rs.PerPrompt(((-4, 3), (-1,)))])
def test_positions_may_differ_from_prompt_to_prompt(unequal, positions):
    assert unequal.at(positions).int().tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]


def test_positions_for_another_number_of_prompts_are_refused(unequal):
    with pytest.raises(PromptError, match="positions for 1 prompts, but there are 2; give some for each one"):
        unequal.at(rs.PerPrompt(((0,),)))


def test_numbers_of_other_libraries_are_positions(unequal):
    with unchecked():
        assert torch.equal(unequal.at(np.int64(-1)), unequal.at(-1))
        assert torch.equal(unequal.at([np.int64(0), "last"]), unequal.at([0, -1]))


def test_the_last_token_is_each_prompts_own(unequal):
    assert unequal.at("last").int().tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


# Pieces of the text

SENTENCE = "When Mary and John went to the Eiffel Tower, John gave a drink to"


@pytest.fixture(params=["text", "ids"])
def sentence(request, smollm2):
    """The sentence as text, whose offsets the tokenizer knows, and as token ids, which have to be decoded."""
    return smollm2.tokenize(SENTENCE if request.param == "text" else smollm2.tokenize(SENTENCE).ids)


@pytest.mark.parametrize(
    ("piece", "chosen"),
    [
        ("Mary", [" Mary"]),
        (" Mary", [" Mary"]),
        (" Eiffel", [" E", "iffel"]),
        ("iff", ["iffel"]),
        ("Eiffel Tower,", [" E", "iffel", " Tower", ","]),
        ("y and", [" Mary", " and"]),
        (rs.Substring("John"), None),
        (rs.Substring("John", occurrence=0), [" John"]),
        (rs.Substring("to", occurrence=-1), [" to"]),
        (["Mary", "last"], [" Mary", " to"]),
        (["Mary", 0, rs.Substring("John", 1)], ["When", " Mary", " John"]),
        (SENTENCE, None),
    ],
)
def test_a_piece_of_text_is_the_tokens_that_overlap_it(sentence, piece, chosen):
    if piece == rs.Substring("John"):
        with pytest.raises(PromptError, match="stands 2 times"):
            sentence.at(piece)
    elif piece == SENTENCE:
        assert sentence.at(piece).all()
    else:
        assert [sentence.strings[0][at] for _, at in sentence.at(piece).nonzero().tolist()] == chosen


def test_occurrences_are_counted_from_either_end(sentence):
    first, second = (sentence.at(rs.Substring("John", occurrence)).nonzero()[0, 1] for occurrence in (0, 1))
    assert sentence.strings[0][first] == sentence.strings[0][second] == " John"
    assert first < second
    assert sentence.at(rs.Substring("John", -1))[0, second]
    assert sentence.at(rs.Substring("John", -2))[0, first]


BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}


def overlapping_bytes(tokenizer, text, start, end):
    """The tokens that hold a byte of some characters, from the bytes that each token of a byte-level tokenizer is."""
    first, stop = len(text[:start].encode()), len(text[:end].encode())
    found, place = [], 0
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])):
        size = len(bytes(BYTE_OF[letter] for letter in token))
        found += [number] if place < stop and first < place + size else []
        place += size
    assert place == len(text.encode())
    return found


def pieces_are_found_to_the_byte(smollm2, text, start, end):
    ids = smollm2.tokenizer(text)["input_ids"]
    expected = overlapping_bytes(smollm2.tokenizer, text, start, end)
    piece = text[start:end]
    occurrence = sum(text.startswith(piece, at) for at in range(start))
    for prompt in (text, torch.tensor([ids])):
        tokens = smollm2.tokenize(prompt)
        assert tokens.at(rs.Substring(piece, occurrence)).nonzero()[:, 1].tolist() == expected


BROKEN = "The 東京 Tower 😀 is naïve 東 ok"


@pytest.mark.parametrize("start", range(len(BROKEN)))
def test_pieces_of_characters_are_found_to_the_byte(smollm2, start):
    """Characters that are split over tokens: " 東" is three, and the first of them also holds the space."""
    assert len(smollm2.tokenizer(" 東")["input_ids"]) == 3
    for end in range(start + 1, min(start + 4, len(BROKEN)) + 1):
        pieces_are_found_to_the_byte(smollm2, BROKEN, start, end)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_piece_of_any_text_is_found_to_the_byte(smollm2, data):
    text = data.draw(
        st.text(st.sampled_from("ab c,東京😀ïé\n1"), min_size=1, max_size=12).filter(lambda t: t[-1] != " ")
    )
    start = data.draw(st.integers(0, len(text) - 1))
    pieces_are_found_to_the_byte(smollm2, text, start, data.draw(st.integers(start + 1, len(text))))


@pytest.mark.parametrize("planted", ["touching is overlapping", "offsets by character"])
def test_a_piece_that_is_off_is_noticed(smollm2, planted, monkeypatch):
    """The twin of the tests above."""
    if planted == "touching is overlapping":
        wide = lambda text, start, end: [n for n, (a, b) in enumerate(text.spans) if a <= end and start <= b]  # noqa: E731
        monkeypatch.setattr(Text, "tokens_between", wide)
    else:
        ends = lambda tokenizer, row: [len(tokenizer.decode(row[:n])) for n in range(len(row) + 1)]  # noqa: E731
        naive = lambda tokenizer, row: Text(tokenizer.decode(row), tuple(pairwise(ends(tokenizer, row))))  # noqa: E731
        monkeypatch.setattr("resstream.models.text._by_decoding", naive)
    with pytest.raises((AssertionError, PromptError)):
        test_pieces_of_characters_are_found_to_the_byte(smollm2, BROKEN.index("京"))


def test_pieces_are_found_in_every_prompt_of_a_batch(smollm2):
    tokens = smollm2.tokenize(["The Eiffel Tower", "Is it true that the Eiffel Tower is in Rome?"])
    expected = [[0, 1], [0, 2], [1, 5], [1, 6]]
    assert tokens.at("Eiffel").nonzero().tolist() == expected
    assert tokens.take([1, 0]).at("Eiffel").nonzero().tolist() == [[0, 5], [0, 6], [1, 1], [1, 2]]
    assert tokens.alone(0).at("Eiffel").nonzero().tolist() == [[0, 1], [0, 2]]
    joined = join(smollm2.tokenize("An Eiffel"), tokens)
    assert joined.at("Eiffel").nonzero().tolist() == [[0, 1], [0, 2], *([row + 1, at] for row, at in expected)]


def test_pieces_are_found_through_other_tokenizers():
    own = tokenizer()
    assert read("w3 w1 w4", own).at("w1").tolist() == [[False, True, False]]
    assert read(torch.tensor([3, 1, 4]), own).at("w1").tolist() == [[False, True, False]]
    special = tokenizer()
    special.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="w0 $A", special_tokens=[("w0", 0), ("w2", 2)]
    )
    assert read("w3 w1", special).at("w3").tolist() == [[False, True, False]], "what is added has no text"
    ids = torch.tensor([1, 4, 2])
    assert read(ids, sentence_piece()).at(rs.Substring("Paris", -1))[0].tolist() == [False, False, True]


def test_edits_and_reads_take_pieces_of_text(smollm2):
    """What is read at "Eiffel" is what is read at its two positions, and an edit there is an edit at these."""
    prompt = "The Eiffel Tower is in"
    by_name = rs.read(smollm2, prompt, sites="3.resid_post", positions="Eiffel")["3.resid_post"]
    by_number = rs.read(smollm2, prompt, sites="3.resid_post", positions=[1, 2])["3.resid_post"]
    assert by_name.shape == (1, 2, 576)
    assert torch.equal(by_name, by_number)
    logits = []
    for positions in (["Eiffel", "last"], [1, 2, -1]):
        with rs.edited(smollm2, rs.Zero("5.attn", positions=positions)) as edited, torch.no_grad():
            logits.append(edited.logits(prompt))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ("Jon", r"no 'Jon' in prompt 0: its tokens are \['When', ' Mary', .* name a piece of its text, a number, or"),
        (" When", r"no ' When' in prompt 0: its tokens are \['When'.*did you mean 'When'\?"),
        ("mary", r"no 'mary' in prompt 0: .*did you mean 'Mary'\?"),
        (
            "John",
            r"'John' stands 2 times in prompt 0, at tokens \[\[3\], \[11\]\] of \['When'.*"
            r"write rs\.Substring\('John', occurrence=0\) for the first, and so on, or -1 for the last",
        ),
        (rs.Substring("John", 2), r"no occurrence 2 of 'John' in prompt 0: it stands there 2 times.*use -2 to 1"),
        (rs.Substring("John", -3), r"no occurrence -3 of 'John'"),
    ],
)
def test_pieces_that_are_not_there_or_not_one_are_refused(sentence, piece, message):
    with pytest.raises(PromptError, match=message):
        sentence.at(piece)


def test_other_pieces_are_refused():
    with pytest.raises(PromptError, match="stands everywhere; give a piece of the text"):
        rs.Substring("")
    with pytest.raises(PromptError, match="stands everywhere"):
        read("w3 w1", tokenizer()).at("")
    with pytest.raises(PromptError, match=r"no token of prompt 0 stands for ' ': its tokens are \['w3', 'w1'\]"):
        read("w3 w1", tokenizer()).at(" ")
    with pytest.raises(
        PromptError, match="cannot look for 'w3' in prompt 0: token ids without a tokenizer have no text"
    ):
        read(torch.tensor([3, 1])).at("w3")


def test_shapes_are_checked():
    with pytest.raises(Exception, match="ids"):
        Tokens(torch.zeros(3, dtype=torch.long), (3,), (("a", "b", "c"),))


# Strings


def byte_level():
    """Letters, a space, and the three bytes of one character, each a token."""
    words = {word: number for number, word in enumerate(["a", "Ġa", "æ", "Ŀ", "±", "Ġ"])}
    plain = Tokenizer(models.BPE(words, [("Ġ", "a")]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain)


def sentence_piece():
    """A word with and without its space, a space, and a byte, each a token, decoded as Llama's tokenizer does."""
    words = {word: number for number, word in enumerate(["<unk>", "▁Paris", "Paris", "▁", "<0xE6>"])}
    plain = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    plain.decoder = decoders.Sequence(steps)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain)


@pytest.mark.parametrize(
    ("own", "strings"),
    [
        (byte_level(), ["a", " a", "æ", "Ŀ", "±", " ", "<id 6>"]),
        (sentence_piece(), ["<unk>", " Paris", "Paris", "▁", "<0xE6>", "<id 5>"]),
        (None, ["0", "1", "2"]),
    ],
)
def test_no_two_tokens_look_alike(own, strings):
    assert [token_string(own, token) for token in range(len(strings))] == strings
