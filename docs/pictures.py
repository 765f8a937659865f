"""Make the pictures of the documentation anew: python docs/pictures.py"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import resstream as rs

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
UNRELATED = "While Kate or Paul sat in a park; Paul sold his book for"
FACT = "The Eiffel Tower is in the city of"
PROSE = (
    "The old harbour had been quiet for years before the ferries came back. Now the cafes open early, and by noon the "
    "square is full of people who wait for the boat, drink their coffee and talk about the weather."
)


def main() -> None:
    """Measure SmolLM2 as the pages do, and save what `Result.plot` draws."""
    model = rs.load("smollm2")
    metric = rs.logit_diff(" Mary", " John")
    results = (
        rs.logit_lens(model, FACT, sites=["embed", "resid_post"], targets=" Paris"),
        rs.patch_activations(model, CLEAN, CORRUPTED, metric),
        rs.ablate_layers(model, CLEAN, metric=metric),
        rs.lesion_curve(model, PROSE, how="delete"),
        rs.path_lengths(model, CLEAN, metric),
        rs.logit_by_path_length(model, CLEAN, " Mary", " John"),
        rs.layer_ensemble(model, CLEAN, metric, units=range(10, 20)),
        rs.stream_health(model, manual(model)),
    )
    folder = Path(__file__).parent / "img"
    for result in results:
        print(result)
        result.plot().figure.savefig(folder / f"{result.measure}.png", dpi=80, bbox_inches="tight")
    patching_scaling(model).savefig(folder / "patching_scaling.png", dpi=80, bbox_inches="tight")


def manual(model: rs.ResidualModel) -> torch.Tensor:
    """The first 256 tokens of Python's language reference, as ids."""
    return torch.tensor([model.tokenizer(" ".join(topics.values())[:20000])["input_ids"][:256]])


def patching_scaling(model: rs.ResidualModel) -> Figure:
    """What a cell costs as the grid grows along each of its axes, in prompts that differ at every position."""

    def seconds(pairs: int, layers: range, positions: range) -> float:
        clean, corrupted = [CLEAN] * pairs, [UNRELATED] * pairs
        options = {"layers": list(layers), "positions": list(positions)}
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            rs.patch_activations(model, clean, corrupted, rs.logit_diff(" Mary", " John"), **options)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    some, every = range(0, 30, 10), range(14)
    grids = {
        "layers": [(1, range(0, 30, step), every) for step in (8, 4, 2, 1)],
        "positions": [(1, some, range(0, 14, step)) for step in (4, 2, 1)],
        "pairs": [(pairs, some, every) for pairs in (1, 2, 4, 8)],
    }
    figure, ax = plt.subplots(figsize=(6, 4))
    for axis, sizes in grids.items():
        cells = [pairs * len(layers) * len(positions) for pairs, layers, positions in sizes]
        costs = [1e3 * seconds(*size) / count for size, count in zip(sizes, cells, strict=True)]
        ax.plot(cells, costs, marker="o", label=f"more {axis}")
    ax.set(xscale="log", ylim=(0, None), xlabel="cells of the grid", ylabel="ms a cell", title="Patching SmolLM2")
    ax.set_xticks(ticks := [10, 20, 50, 100, 200, 500], map(str, ticks))
    ax.minorticks_off()
    ax.legend()
    return figure


if __name__ == "__main__":
    main()
