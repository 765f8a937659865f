"""Stream health of SmolLM2 on 256 tokens of prose: its time, and the memory of the whole process."""

from __future__ import annotations

import subprocess
import sys

_HEALTH = """
import pydoc_data.topics, resource, time, torch
torch.set_num_threads(2)
import resstream as rs
model = rs.load("smollm2")
text = " ".join(pydoc_data.topics.topics.values())
ids = torch.tensor([model.tokenizer(text[:20000])["input_ids"][:256]])
begin = time.perf_counter()
found = rs.stream_health(model, ids)
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
print(seconds, peak, found.check.error, int(found.data.found.sum()))
"""


def test_health_at_256_tokens():
    run = subprocess.run([sys.executable, "-c", _HEALTH], capture_output=True, text=True, check=True)
    seconds, peak, error, faults = map(float, run.stdout.split())
    print(f"\nstream health at 256 tokens: {seconds:.1f} s, {peak:.2f} GB for the whole process, off by {error:.1e}")
    assert seconds < 30
    assert peak < 2
    assert error <= 1e-5
    assert faults == 0
