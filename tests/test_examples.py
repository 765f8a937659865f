"""Every example runs as it stands, and says what its text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"

SCRIPTS = {
    "ablate_layers.py": ["--unit", "mlp"],
    "path_histogram.py": ["--start", "26", "--samples", "4"],
}


# Each notebook with the number of its pictures.
NOTEBOOKS = {"tour.ipynb": 4, "name_movers.ipynb": 2, "implicit_ensemble.ipynb": 6, "residual_lab.ipynb": 7}


def test_every_example_is_run_here():
    found = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert found == {*SCRIPTS, *NOTEBOOKS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_and_saves_its_picture(name, tmp_path):
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(EXAMPLES / name), *SCRIPTS[name], "--out", str(picture)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert "check: " in run.stdout
    assert "(ok)" in run.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_from_top_to_bottom(name, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND")  # a notebook shows its pictures, which these tests otherwise do without
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == NOTEBOOKS[name]
    texts = "".join(output.get("data", {}).get("text/plain", "") for output in outputs)
    assert texts.count("(ok)") >= 5
    assert "FAILED" not in texts
