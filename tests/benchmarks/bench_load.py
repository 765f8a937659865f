"""What loading and importing cost, against transformers and torch themselves."""

from __future__ import annotations

import statistics
import subprocess
import sys

from tests.benchmarks.side_by_side import medians


def test_second_load_against_transformers(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import resstream as rs
    from resstream.models.bundled import obtain

    folder = obtain("smollm2")

    def plain():
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    times = medians({"transformers": plain, "resstream": lambda: rs.load("smollm2")}, rounds=7)
    ratio = times["resstream"] / times["transformers"]
    theirs, ours = times["transformers"], times["resstream"]
    print(f"\nload: transformers {theirs:.3f} s, resstream {ours:.3f} s, ratio {ratio:.2f}")
    assert ratio <= 1.5


def test_import_against_torch():
    def seconds(statement: str) -> float:
        timed = f"import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
        command = [sys.executable, "-c", timed]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(5)]
        return statistics.median(map(float, runs))

    torch_alone, both = seconds("import torch"), seconds("import torch; import resstream")
    alone = seconds("import resstream")
    print(f"\nimport: torch {torch_alone:.2f} s, torch and resstream {both:.2f} s, resstream alone {alone:.3f} s")
    assert both - torch_alone <= 0.3
