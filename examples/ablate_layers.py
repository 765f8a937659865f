"""Remove each layer of a model in turn, and see what its answer loses.

python examples/ablate_layers.py --prompt "The Eiffel Tower is in the city of" --answer " Paris" --out ablation.png
"""

from __future__ import annotations

import argparse

import resstream as rs


def main() -> None:
    """Ablate, print the layers that matter most, and save the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="bundled name, local folder, .gguf file or hub id")
    parser.add_argument("--prompt", default="The Eiffel Tower is in the city of")
    parser.add_argument("--answer", default=" Paris", help="the next token that is followed, with its leading space")
    parser.add_argument("--unit", default="layer", choices=["layer", "attn", "mlp"])
    parser.add_argument("--how", default="skip", choices=["skip", "zero", "mean", "resample"])
    parser.add_argument("--reference", nargs="*", help="prompts to take means or other writes from")
    parser.add_argument("--out", help="where to save the picture, such as ablation.png")
    options = parser.parse_args()

    model = rs.load(options.model)
    result = rs.ablate_layers(
        model,
        options.prompt,
        unit=options.unit,
        how=options.how,
        metric=rs.log_prob(options.answer),
        reference=options.reference,
    )
    print(result)
    strongest = result.to_dataframe().sort_values("effect")
    print(strongest[["unit", "metric", "effect"]].head(8).to_string(index=False))
    if options.out:
        result.plot().figure.savefig(options.out, bbox_inches="tight")
        print(f"saved {options.out}")


if __name__ == "__main__":
    main()
