"""The exact path-length spectrum, against forward plus backward passes of the same float64 model."""

from __future__ import annotations

from resstream.measure.metrics import logit_diff
from resstream.measure.paths import Expansion
from tests.benchmarks.side_by_side import medians

PROMPT = "When Mary and John went to the store, John gave a drink to"


def test_spectrum_against_forward_and_backward(smollm2):
    wide = smollm2.in_float64()
    tokens = wide.tokenize(PROMPT)
    metric = logit_diff(" Mary", " John")
    mary, john = (wide.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))

    def one_pass():
        for parameter in wide.hf_model.parameters():
            parameter.grad = None
        logits = wide.logits(tokens)
        (logits[0, -1, mary] - logits[0, -1, john]).backward()

    def spectrum():
        return Expansion.of(wide, tokens, 0, metric, "write", 0).by_length()

    times = medians({"pass": one_pass, "spectrum": spectrum}, rounds=5)
    ratio = times["spectrum"] / times["pass"]
    print(
        f"\n2^60 paths: {times['spectrum']:.2f} s, forward and backward pass {times['pass']:.2f} s, ratio {ratio:.1f}"
    )
