"""Passages of plain English, on which experiments look at a trained language model."""

from __future__ import annotations

from resstream.errors import LabError

PASSAGES = (
    "The river rises in the hills north of the town and runs for forty miles before it reaches the sea. In spring, "
    "when the snow melts, it floods the meadows on both banks, and the farmers move their cattle to higher ground.",
    "To make a good loaf of bread you need flour, water, salt and time. Mix them in a large bowl, let the dough rest "
    "for an hour, fold it twice, and bake it in a hot oven until the crust is dark and the loaf sounds hollow.",
    "The first steam engines were built to pump water out of mines. They burned so much coal that they could only be "
    "used where coal was cheap, until James Watt added a separate condenser, which saved most of the heat.",
    "Light from the Sun takes about eight minutes to reach the Earth. It leaves the surface as white light, and when "
    "it passes through drops of rain it is split into the colours of the rainbow, from red to violet.",
    "She opened the letter at the kitchen table and read it twice. Her brother was coming home after eleven years, and "
    "he wanted to know whether the old house by the station was still empty, and who had the keys.",
    "A computer program is a list of instructions that a machine carries out one after another. Most programs are "
    "written in a language that people can read, and are translated by another program into numbers.",
)


def passages(count: int) -> list[str]:
    """The first few passages.

    >>> len(passages(2))
    2

    Raises:
        LabError: none, or more than there are.
    """
    if isinstance(count, bool) or count not in range(1, len(PASSAGES) + 1):
        raise LabError(f"texts={count!r}: there are {len(PASSAGES)} passages; give a number from 1 to {len(PASSAGES)}")
    return list(PASSAGES[:count])
