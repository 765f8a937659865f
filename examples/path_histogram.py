"""Split a model's gradient by path length, and draw Veit's picture of the implicit ensemble.

python examples/path_histogram.py --samples 16 --out paths.png
"""

from __future__ import annotations

import argparse

import resstream as rs


def main() -> None:
    """Expand the gradient of a logit difference, print what each length carries, and save the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="bundled name, local folder, .gguf file or hub id")
    parser.add_argument("--prompt", default="When Mary and John went to the store, John gave a drink to")
    parser.add_argument("--answer", default=" Mary", help="the next token, with its leading space")
    parser.add_argument("--against", default=" John", help="the token that it is compared with")
    parser.add_argument("--unit", default="layer", choices=["write", "layer"])
    parser.add_argument("--start", type=int, default=0, help="layer at whose input the gradient is taken")
    parser.add_argument("--samples", type=int, default=16, help="single paths drawn for each length; 0 for none")
    parser.add_argument("--out", help="where to save the picture, such as paths.png")
    options = parser.parse_args()

    model = rs.load(options.model)
    result = rs.path_lengths(
        model,
        options.prompt,
        rs.logit_diff(options.answer, options.against),
        unit=options.unit,
        start=options.start,
        samples=options.samples,
        progress=True,
    )
    print(result)
    table = result.data.isel(prompt=0)[["count", "norm", "share", "path_norm", "veit"]].to_dataframe()
    print(table[["count", "norm", "share", "path_norm", "veit"]].to_string(float_format="{:.3g}".format))
    if options.out:
        result.plot().figure.savefig(options.out, bbox_inches="tight")
        print(f"saved {options.out}")


if __name__ == "__main__":
    main()
