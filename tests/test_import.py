"""Importing the package costs next to nothing, and every public name is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import resstream

HEAVY = ("transformers", "transformer_lens", "matplotlib", "xarray", "pandas", "torch")


def run(code):
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("use", ["import resstream", "import resstream; dir(resstream)", "from resstream import Check"])
def test_importing_is_light(use):
    loaded = run(f"import sys; {use}; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_a_heavy_import_is_noticed():
    """The twin of the test above."""
    assert "matplotlib" in run(f"import sys, resstream, matplotlib; print([n for n in {HEAVY} if n in sys.modules])")


def test_measuring_does_not_load_what_draws():
    """Nor does it load transformers, until a model is."""
    names = "resstream.logit_lens, resstream.patch_activations, resstream.edited"
    loaded = run(f"import sys, resstream; {names}; print(*sys.modules)").split()
    assert "resstream.measure.patching" in loaded
    assert not {"matplotlib", "transformers", "transformer_lens"} & set(loaded)


def test_public_names():
    assert len(set(resstream.__all__)) == len(resstream.__all__)
    assert {"load", "read", "edited", "logit_lens", "patch_activations", "ablate_layers", "path_lengths"} <= set(
        resstream.__all__
    )
    assert set(resstream.__all__) <= set(dir(resstream))
    assert dir(resstream) == sorted(dir(resstream))
    for name in resstream.__all__:
        assert getattr(resstream, name).__name__.rpartition(".")[2].strip("_") == name
        assert getattr(resstream, name) is getattr(resstream, name)
    everything: dict = {}
    exec("from resstream import *", everything)
    assert set(resstream.__all__) <= set(everything)


def test_names_for_type_checkers_are_the_public_names():
    """What the editor offers is what is there."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(resstream.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    offered = {(line.module, alias.asname) for line in block.body for alias in line.names}
    rooms = {("resstream", name) for name in resstream._ROOMS}
    assert offered == rooms | {(f"resstream.{home}", name) for name, home in resstream._HOME_OF.items()}


def test_an_unknown_name():
    name = "logit_lense"
    with pytest.raises(AttributeError) as error:
        getattr(resstream, name)
    assert str(error.value) == "module 'resstream' has no attribute 'logit_lense'"
