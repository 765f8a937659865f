"""The exact path-length spectrum, against forward plus backward passes of the same float64 model."""

from __future__ import annotations

import subprocess
import sys

import torch

from resstream.measure.metrics import logit_diff
from resstream.stream.expand import Expansion
from tests.benchmarks.side_by_side import medians

PROMPT = "When Mary and John went to the store, John gave a drink to"


def test_spectrum_against_forward_and_backward(smollm2):
    wide = smollm2.in_float64()
    tokens = wide.tokenize(PROMPT)
    mary, john = (wide.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    with torch.no_grad():
        score = logit_diff(" Mary", " John").bind(wide, tokens, wide.trunk(tokens).run())

    def one_pass():
        for parameter in wide.hf_model.parameters():
            parameter.grad = None
        logits = wide.own_logits(tokens)
        (logits[0, -1, mary] - logits[0, -1, john]).backward()

    def spectrum():
        expansion = Expansion.of(wide, tokens.alone(0), lambda final: score(final, [0]), unit="write")
        return [norms for _, norms in expansion.descend()][-1]

    times = medians({"pass": one_pass, "spectrum": spectrum}, rounds=5)
    whole, plain = times["spectrum"], times["pass"]
    print(f"\n2^60 paths: {whole:.2f} s, forward and backward pass {plain:.2f} s, ratio {whole / plain:.1f}")
    assert whole / plain <= 8


_LONG = """
import pydoc_data.topics, resource, torch
torch.set_num_threads(1)
import resstream as rs
model = rs.load("smollm2")
text = " ".join(pydoc_data.topics.topics.values())
ids = torch.tensor([model.tokenizer(text[:20000])["input_ids"][:256]])
found = rs.path_lengths(model, ids, samples=2, signs=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2, found.check.error)
"""


def test_memory_at_256_tokens():
    run = subprocess.run([sys.executable, "-c", _LONG], capture_output=True, text=True, check=True)
    peak, error = map(float, run.stdout.split())
    print(f"\n2^60 paths at 256 tokens: {peak:.2f} GB for the whole process, completeness {error:.1e}")
    assert peak < 3
    assert error < 1e-8
