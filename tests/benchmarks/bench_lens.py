"""The memory that the logit lens takes above the model, at 512 tokens and all 31 boundaries."""

from __future__ import annotations

import subprocess
import sys

_LENS = """
import pydoc_data.topics, resource, torch
torch.set_num_threads(1)
import resstream as rs
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
model = rs.load("smollm2")
text = " ".join(pydoc_data.topics.topics.values())
ids = torch.tensor([model.tokenizer(text[:20000])["input_ids"][:512]])
with torch.no_grad():
    model.logits(ids[:, :8])
rs.logit_lens(model, ids[:, :8], sites=["embed"])
before = peak()
lens = rs.logit_lens(model, ids, sites=["embed", "resid_post"])
print(peak() - before, lens.check.error)
"""


def test_lens_memory_at_512_tokens():
    run = subprocess.run([sys.executable, "-c", _LENS], capture_output=True, text=True, check=True)
    above, error = map(float, run.stdout.split())
    print(f"\nlens, 31 boundaries x 512 tokens: {above:.0f} MB above the model, last site off by {error:.1e}")
    assert above < 500
    assert error <= 1e-5
