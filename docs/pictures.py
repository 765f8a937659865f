"""Make the pictures of the documentation anew: python docs/pictures.py"""

from __future__ import annotations

from pathlib import Path

import resstream as rs

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
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
    )
    folder = Path(__file__).parent / "img"
    for result in results:
        print(result)
        result.plot().figure.savefig(folder / f"{result.measure}.png", dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    main()
