"""Residual rules: how a step joins what its branch writes to the stream, one class for each, by name."""

from __future__ import annotations

from resstream.errors import LabError, listed
from resstream.lab.rules.base import Batch, Place, Rule, Weights
from resstream.lab.rules.depth import DeepNorm, DeepNormScales, GPT2Scaling, LNScaling
from resstream.lab.rules.noise import DropoutSkip, StochasticDepth
from resstream.lab.rules.norms import AdaLN, PostLN, PreLN, SandwichLN
from resstream.lab.rules.scalars import LayerScale, ReZero, SkipInit
from resstream.lab.rules.skips import GatedSkip, Plain, ProjectedSkip, Residual, ScaledSkip, TrunkActivation
from resstream.lab.rules.starts import Fixup, TFixup
from resstream.lab.rules.switchable import Switchable

RULES: dict[str, type[Rule]] = {
    "plain": Plain,
    "residual": Residual,
    "scaled_skip": ScaledSkip,
    "trunk_activation": TrunkActivation,
    "gated_skip": GatedSkip,
    "projected_skip": ProjectedSkip,
    "dropout_skip": DropoutSkip,
    "stochastic_depth": StochasticDepth,
    "pre_ln": PreLN,
    "post_ln": PostLN,
    "sandwich_ln": SandwichLN,
    "ada_ln": AdaLN,
    "deep_norm": DeepNorm,
    "gpt2_scaling": GPT2Scaling,
    "ln_scaling": LNScaling,
    "re_zero": ReZero,
    "skip_init": SkipInit,
    "layer_scale": LayerScale,
    "fixup": Fixup,
    "t_fixup": TFixup,
    "switchable": Switchable,
}


def rule_of(rule: str | Rule) -> Rule:
    """A rule, by its name or as it is.

    >>> rule_of("pre_ln")
    PreLN()

    Raises:
        LabError: no rule of that name, or something that is no rule.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise LabError(f"no residual rule {rule!r}: there are {listed(RULES, limit=99)}; or give one, such as PreLN()")
    return RULES[rule]()


__all__ = [
    "RULES",
    "AdaLN",
    "Batch",
    "DeepNorm",
    "DeepNormScales",
    "DropoutSkip",
    "Fixup",
    "GPT2Scaling",
    "GatedSkip",
    "LNScaling",
    "LayerScale",
    "Place",
    "Plain",
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
    "TrunkActivation",
    "Weights",
    "rule_of",
]
