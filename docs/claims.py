"""Make the page of claims anew, by running every experiment of the lab in full: python docs/claims.py [NAME ...]

With names, those experiments run again and the others keep what the last run found, from docs/claims.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from resstream.lab.experiments import EXPERIMENTS, experiment

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "claims.json", HERE / "claims.md"
INTRODUCTION = """# Claims about residual connections

Much is said about residual connections. Here each claim stands beside the command that tests it, the figure that it is
made with, and the figure that the command finds; intervals are 95 % over seeds. The last column says whether it
**holds**, **holds at initialisation only**, or **does not hold**, and then why.

This page is written by `python docs/claims.py`, which runs all the commands; what each experiment does is told in
[Experiments](experiments.md).
"""


def main(names: list[str]) -> None:
    """Run experiments, keep their claims, and write the page."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for name in names or EXPERIMENTS:
        result = experiment(name).run()
        print(result, flush=True)
        result.plot().figure.savefig(HERE / "img" / f"lab_{name}.png", dpi=80, bbox_inches="tight")
        if not result.check.passed:
            sys.exit(f"the check of {name} failed, so its claims are not written: {result.check}")
        kept[name] = result.settings["claims"]
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page({name: kept[name] for name in EXPERIMENTS if name in kept}), encoding="utf-8")


def page(claims: dict[str, list[dict[str, Any]]]) -> str:
    """The page, from the claims of each experiment, in the order of their rows."""
    lines = [INTRODUCTION, "| | claim | source | command | figure there | figure here | verdict |", "|" + "---|" * 7]
    told = [(claim, name) for name, found in claims.items() for claim in found]
    for claim, name in sorted(told, key=lambda each: _order(each[0]["row"])):
        verdict = f"**{claim['verdict']}**" + (f": {claim['because']}" if claim["because"] else "")
        cells = (claim["row"], claim["says"], claim["source"], f"`resstream lab {name}`")
        lines.append("| " + " | ".join(map(_cell, (*cells, claim["expected"], claim["found"], verdict))) + " |")
    return "\n".join(lines) + "\n"


def _order(row: str) -> tuple[str, int]:
    letter, number = re.fullmatch(r"([A-Z])(\d+)", row).groups()  # type: ignore[union-attr]
    return letter, int(number)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    main(sys.argv[1:])
