"""Prompts become the tokenizer's own ids, padded on the right; nothing is added, cut or moved silently."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from resstream.errors import PromptError
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
    assert read("w1 " * 8, tokenizer()).width == 8
    refused("prompt 0 has 9 tokens, but toy reads at most 8; shorten the prompt", "w1 " * 9, tokenizer())
    refused("prompt 1 has 9 tokens", ["w1", "w1 " * 9], tokenizer())
    assert read("w1 " * 9, tokenizer(), max_positions=None).width == 9


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
