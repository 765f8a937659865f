"""The classic experiments about residual connections, by name: each returns a Result with its claims and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from resstream.errors import LabError, listed
from resstream.lab.experiments.attention_collapse import attention_collapse
from resstream.lab.experiments.bf16_drift import bf16_drift
from resstream.lab.experiments.deepnorm_depth import deepnorm_depth
from resstream.lab.experiments.depth_degradation import depth_degradation
from resstream.lab.experiments.euler_halving import euler_halving
from resstream.lab.experiments.gradient_check import gradient_check
from resstream.lab.experiments.gradient_fan import gradient_fan
from resstream.lab.experiments.gradient_profile import gradient_profile
from resstream.lab.experiments.implicit_ensemble import implicit_ensemble
from resstream.lab.experiments.layer_ablation import layer_ablation
from resstream.lab.experiments.layer_scale_absorption import layer_scale_absorption
from resstream.lab.experiments.norm_placement import norm_placement
from resstream.lab.experiments.other_skips import other_skips
from resstream.lab.experiments.path_expansion import path_expansion
from resstream.lab.experiments.path_length_counts import path_length_counts
from resstream.lab.experiments.pitfalls import pitfalls
from resstream.lab.experiments.skip_training import skip_training
from resstream.lab.experiments.stochastic_depth import stochastic_depth
from resstream.lab.experiments.stream_bus import stream_bus
from resstream.lab.experiments.switchable_block import switchable_block
from resstream.lab.experiments.trunk_activation import trunk_activation
from resstream.lab.experiments.variance_growth import variance_growth
from resstream.lab.experiments.zero_init_training import zero_init_training
from resstream.result import Result


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        run: the function; all its arguments have defaults, with which the claims are made.
        rows: the claims that it is about.
        question: what it asks, in a line.
        short: arguments of a form that takes seconds, for a first look and for tests.
    """

    run: Callable[..., Result]
    rows: tuple[str, ...]
    question: str
    short: Mapping[str, Any] = field(default_factory=dict)


EXPERIMENTS: dict[str, Experiment] = {
    "gradient_fan": Experiment(
        gradient_fan, ("A1",), "How much gradient do skips with a factor pass on?", {"seeds": 3}
    ),
    "skip_training": Experiment(
        skip_training,
        ("A2",),
        "Which skips with a factor let a deep stack learn?",
        {"scales": (0.85, 1.0, 1.1), "steps": 150},
    ),
    "trunk_activation": Experiment(
        trunk_activation,
        ("A3",),
        "What does an activation on the trunk cost?",
        {"seeds": 3, "trained": 1, "steps": 100},
    ),
    "other_skips": Experiment(other_skips, ("A4",), "Are gates, projections or dropout better skips?", {"seeds": 1}),
    "gradient_check": Experiment(
        gradient_check, ("A5",), "Are the gradients of every rule right?", {"entries": 1, "seeds": 1}
    ),
    "depth_degradation": Experiment(
        depth_degradation,
        ("B1",),
        "How deep can a stack without skips learn?",
        {"depths": (8, 48), "steps": 120, "seeds": 1},
    ),
    "gradient_profile": Experiment(
        gradient_profile, ("B2",), "How does the gradient change from layer to layer?", {"seeds": 3}
    ),
    "path_expansion": Experiment(path_expansion, ("C1",), "What are the paths that a gradient is the sum of?"),
    "implicit_ensemble": Experiment(
        implicit_ensemble,
        ("C2",),
        "What do deleted layers cost, and do they leave other paths alone?",
        {"depth": 10, "steps": 200, "seeds": 1},
    ),
    "path_length_counts": Experiment(
        path_length_counts, ("C3",), "Which lengths of path does the gradient come from?", {"points": 3, "seeds": 1}
    ),
    "euler_halving": Experiment(
        euler_halving, ("C8",), "Is a residual stack a flow in small steps?", {"counts": (16, 32, 64), "seeds": 3}
    ),
    "stochastic_depth": Experiment(
        stochastic_depth,
        ("C8",),
        "Does training with layers left out make a net robust to their loss?",
        {"depth": 10, "steps": 200, "samples": 5, "seeds": 1},
    ),
    "zero_init_training": Experiment(
        zero_init_training,
        ("D2", "D3", "D4", "D5"),
        "Which deep stacks train at full rate from the first step?",
        {"depth": 40, "steps": 70, "seeds": 1},
    ),
    "stream_bus": Experiment(
        stream_bus,
        ("C4",),
        "Do late layers read what early layers wrote?",
        {"layers": (0, 5, 10, 15, 20, 25, 29), "seeds": 1},
    ),
    "norm_placement": Experiment(
        norm_placement,
        ("C5",),
        "What does the place of the norm do to the gradient?",
        {"depths": (6, 24), "seeds": 5},
    ),
    "variance_growth": Experiment(
        variance_growth,
        ("C6", "C7", "D2", "D3", "D4", "D5", "D6"),
        "How does the variance of the stream grow with depth?",
        {"seeds": 1, "texts": 2},
    ),
    "deepnorm_depth": Experiment(
        deepnorm_depth, ("C7",), "Does DeepNorm hold at great depth?", {"depths": (10, 30, 100), "seeds": 1}
    ),
    "bf16_drift": Experiment(bf16_drift, ("D7",), "How far does a stream in bfloat16 drift?", {"seeds": 2, "texts": 1}),
    "layer_scale_absorption": Experiment(
        layer_scale_absorption,
        ("D8",),
        "What becomes of tiny writes in low precision?",
        {"scales": (1e-2, 1e-4, 1e-6), "seeds": 2},
    ),
    "attention_collapse": Experiment(
        attention_collapse, ("D9",), "Which collapse is meant: of rank, of entropy, or of writes?", {"seeds": 2}
    ),
    "layer_ablation": Experiment(
        layer_ablation,
        ("D1",),
        "What does a trained model lose with one branch?",
        {"layers": (1, 3, 6, 9, 12, 15, 18, 21, 24, 27), "texts": 2},
    ),
    "pitfalls": Experiment(pitfalls, ("D10",), "Does an examination name each fault, and no other?", {"seeds": 1}),
    "switchable_block": Experiment(
        switchable_block,
        ("D11",),
        "Which settings of a block train, and which shapes fit?",
        {"depth": 2, "steps": 150, "seeds": 1},
    ),
}


def experiment(name: str) -> Experiment:
    """An experiment by its name.

    >>> experiment("gradient_fan").rows
    ('A1',)

    Raises:
        LabError: none of that name.
    """
    if name not in EXPERIMENTS:
        raise LabError(f'no experiment "{name}": there are {listed(EXPERIMENTS, limit=99)}')
    return EXPERIMENTS[name]


__all__ = ["EXPERIMENTS", "Experiment", "experiment", *EXPERIMENTS]
