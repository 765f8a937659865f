"""A small world with known answers: residual rules, toy nets that every measure takes, tasks, and experiments.

>>> from resstream import lab
>>> net = lab.mlp(lab.ScaledSkip(0.8), depth=6)
>>> len(net.carried)
6
"""

from __future__ import annotations

from resstream.lab import experiments
from resstream.lab.branches import Attention, Branch, Layer, Perceptron
from resstream.lab.design import Design
from resstream.lab.ends import Ends, Points, Words
from resstream.lab.nets import Net, mlp, transformer
from resstream.lab.rules import (
    RULES,
    AdaLN,
    Batch,
    DeepNorm,
    DeepNormScales,
    DropoutSkip,
    Fixup,
    GatedSkip,
    GPT2Scaling,
    LayerScale,
    LNScaling,
    Place,
    Plain,
    PostLN,
    PreLN,
    ProjectedSkip,
    Residual,
    ReZero,
    Rule,
    SandwichLN,
    ScaledSkip,
    SkipInit,
    StochasticDepth,
    Switchable,
    TFixup,
    TrunkActivation,
    rule_of,
)
from resstream.lab.tasks import Task, rings, spirals
from resstream.lab.training import Training, train
from resstream.models.carry import Carry

__all__ = [
    "RULES",
    "AdaLN",
    "Attention",
    "Batch",
    "Branch",
    "Carry",
    "DeepNorm",
    "DeepNormScales",
    "Design",
    "DropoutSkip",
    "Ends",
    "Fixup",
    "GPT2Scaling",
    "GatedSkip",
    "LNScaling",
    "Layer",
    "LayerScale",
    "Net",
    "Perceptron",
    "Place",
    "Plain",
    "Points",
    "PostLN",
    "PreLN",
    "ProjectedSkip",
    "ReZero",
    "Residual",
    "Rule",
    "SandwichLN",
    "ScaledSkip",
    "SkipInit",
    "StochasticDepth",
    "Switchable",
    "TFixup",
    "Task",
    "Training",
    "TrunkActivation",
    "Words",
    "experiments",
    "mlp",
    "rings",
    "rule_of",
    "spirals",
    "train",
    "transformer",
]
