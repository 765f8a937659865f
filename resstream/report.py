"""A report: eight questions about one pair of prompts as a page that opens without a network, and as files."""

from __future__ import annotations

import base64
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import torch
from tqdm import tqdm

from resstream.errors import ResultError, UnsupportedModelError
from resstream.measure.ablation import ablate_layers
from resstream.measure.answers import answer_ids
from resstream.measure.ensemble import layer_ensemble
from resstream.measure.lens import logit_lens
from resstream.measure.lesions import lesion_curve
from resstream.measure.logit_paths import Gauge, logit_by_path_length
from resstream.measure.metrics import at_last, logit_diff, wide
from resstream.measure.patching import patch_activations
from resstream.measure.paths import path_lengths
from resstream.models import load
from resstream.models.trunk import ResidualModel
from resstream.plots import save_picture
from resstream.plots.canvas import visible
from resstream.result import Result

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
ANSWER, AGAINST = " Mary", " John"
# The sections, each with the name of its measure; the heads are a second question to patching.
MEASURES = (
    "logit_lens",
    "patch_activations",
    "patch_heads",
    "ablate_layers",
    "layer_ensemble",
    "lesion_curve",
    "path_lengths",
    "logit_by_path_length",
)
# So few that all 2^n subsets of them take seconds.
ENSEMBLE = 10
PAGE = "index.html"
SUFFIXES = (".png", ".pdf", ".svg", ".csv", ".nc")


@dataclass(frozen=True)
class Question:
    """What the measures are asked: one pair of prompts, and two answers to choose between."""

    clean: str
    corrupted: str
    answer: str
    against: str


@dataclass(frozen=True)
class Section:
    """One measure on the page.

    Attributes:
        name: the measure, or what it is asked about.
        title: its question, in plain words.
        reading: how to read the picture.
        run: makes the result; its argument says whether to show progress.
        python: the call that makes it again.
        command: the command line that does the same.
    """

    name: str
    title: str
    reading: str
    run: Callable[[bool], Result]
    python: str
    command: str


def report(
    model: Any,
    clean: str = CLEAN,
    corrupted: str = CORRUPTED,
    answer: str = ANSWER,
    against: str = AGAINST,
    out: str | Path = "resstream-report",
    *,
    progress: bool = True,
) -> Path:
    """Ask one model eight questions about one pair of prompts, and write the answers as a page and as files.

    >>> from resstream.report import report
    >>> page = report("smollm2", out="my-report")  # doctest: +SKIP

    Everything is written beside the folder first, and moved into it at the end, so that an error leaves an older report
    as it was.

    Args:
        model: a model from `load`, or anything that `load` takes.
        clean: the prompt to which `answer` is right.
        corrupted: a prompt of as many tokens, to which `against` is.
        answer, against: the two next tokens, as text (mind the leading space).
        out: the folder to write; files of an older report in it are replaced, others stay.
        progress: whether to show a progress bar.
    Returns:
        The path of the page.
    Raises:
        ResultError: the folder cannot be written.
        PromptError, MetricError: as the measures raise them.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ResultError(f'the report goes into a folder, but "{folder}" is a file; give another name')
    loaded = load(model)
    question = Question(clean, corrupted, answer, against)
    source = str(model) if isinstance(model, (str, Path)) else loaded.name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, so that the last step is a rename.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as draft:
            _write(loaded, question, source, Path(draft), progress)
            _publish(Path(draft), folder)
    except OSError as error:
        raise ResultError(f'"{folder}" cannot be written: {error}; give another place') from error
    return folder / PAGE


def save(result: Result, target: Path) -> None:
    """Write a result to a file whose suffix says how: a picture, a table, or everything.

    Raises:
        ResultError: an unknown suffix, or a place that cannot be written.
    """
    if target.suffix not in SUFFIXES:
        raise ResultError(f'"{target}" does not say what to write: end it in {", ".join(SUFFIXES)}')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".nc":
            result.save(target)
        elif target.suffix == ".csv":
            result.to_dataframe().to_csv(target, index=False, encoding="utf-8")
        else:
            save_picture(result, target)
    except OSError as error:
        raise ResultError(f'"{target}" cannot be written: {error}; give another place') from error


def _write(model: ResidualModel, question: Question, source: str, draft: Path, progress: bool) -> None:
    """Run every measure, and put the page and its files into the draft folder."""
    about = _about(model, question)
    found: dict[str, Result] = {}
    parts = []
    # The measures' own bars redraw themselves many times a second, which only a terminal can show.
    inner = progress and sys.stderr.isatty()
    with tqdm(total=len(MEASURES), unit="measure", disable=not progress) as bar:
        for section in _sections(model, question, source, found):
            bar.set_description(section.name)
            result = found[section.name] = section.run(inner)
            for suffix in (".png", ".csv", ".nc"):
                save(result, draft / (section.name + suffix))
            picture = base64.b64encode((draft / f"{section.name}.png").read_bytes()).decode("ascii")
            parts.append({"section": section, "result": result, "picture": picture})
            bar.update()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        model=model,
        question=question,
        found=parts,
        versions=_versions(),
        load=f"import resstream as rs\n\nmodel = rs.load({source!r})",
        arguments=", ".join(f"{name}={value!r}" for name, value in vars(question).items()),
        command=_shell(
            "report", source, *(part for name, value in vars(question).items() for part in (f"--{name}", value))
        ),
        **about,
    )
    (draft / PAGE).write_text(page, encoding="utf-8")


def _publish(draft: Path, folder: Path) -> None:
    """Move finished files into place, the page last, since it speaks of the others."""
    folder.mkdir(exist_ok=True)
    for file in sorted(draft.iterdir(), key=lambda file: file.name == PAGE):
        os.replace(file, folder / file.name)


def _sections(model: ResidualModel, question: Question, source: str, found: Mapping[str, Result]) -> Iterator[Section]:
    """The measures one after the other; what a later one asks may rest on what an earlier one has found by then."""
    clean, corrupted, answer, against = vars(question).values()
    metric = logit_diff(answer, against)
    spelled = f"rs.logit_diff({answer!r}, {against!r})"
    sites = ("embed", "resid_post")
    answers = ("--answer", answer, "--against", against)
    yield Section(
        "logit_lens",
        "What would each layer answer?",
        "Each column is a token of the clean prompt, each row a layer, from the embedding at the bottom upwards. "
        "A cell shows the next token that the model would give if it stopped there; its colour is the "
        f"log-probability of {visible(answer)}, and bold means that this is the most likely token.",
        lambda bar: logit_lens(model, clean, sites=sites, targets=answer, progress=bar),
        f"rs.logit_lens(model, {clean!r}, sites={sites!r}, targets={answer!r})",
        _shell("lens", source, clean, "--site", "embed", "--site", "resid_post", "--answer", answer),
    )
    yield Section(
        "patch_activations",
        "Where is the answer decided?",
        "The corrupted prompt is run, and at one layer and token its residual stream is replaced by that of the "
        "clean run. 1 means that this one state brings the clean answer back, 0 that it changes nothing.",
        lambda bar: patch_activations(model, clean, corrupted, metric, progress=bar),
        f"rs.patch_activations(model, {clean!r}, {corrupted!r}, {spelled})",
        _shell("patch", source, clean, corrupted, *answers),
    )
    inside = _inside(model)
    options = ("--positions", "all", *(part for kind in inside for part in ("--site", kind)))
    yield Section(
        "patch_heads",
        "Who brings it there?",
        f"{_INSIDE[inside]} of the clean run, at all positions at once, in place of the corrupted run's. Above zero it "
        "brings the clean answer, below zero it works against it.",
        lambda bar: patch_activations(model, clean, corrupted, metric, sites=inside, positions="all", progress=bar),
        f"rs.patch_activations(model, {clean!r}, {corrupted!r}, {spelled}, sites={inside!r}, positions='all')",
        _shell("patch", source, clean, corrupted, *answers, *options),
    )
    yield Section(
        "ablate_layers",
        "Which layers does the answer need?",
        "Each bar is the change of the logit difference when one layer is skipped. Below zero, the layer was "
        "working for the answer; above, against it.",
        lambda bar: ablate_layers(model, clean, metric=metric, progress=bar),
        f"rs.ablate_layers(model, {clean!r}, metric={spelled})",
        _shell("ablate", source, clean, *answers),
    )
    layers = _most_needed(found["ablate_layers"])
    yield Section(
        "layer_ensemble",
        "Do the layers add up?",
        f"Every subset of the {len(layers)} layers that matter most by themselves, with the others left in place. Top: "
        "what each adds to a set of the others, on average. Bottom left: the logit difference with so many of them; on "
        "the dotted line, each would do its part alone. Bottom right: what sets of each size do beyond their parts.",
        lambda bar: layer_ensemble(model, clean, metric, units=layers, exact=True, progress=bar),
        f"rs.layer_ensemble(model, {clean!r}, {spelled}, units={layers!r}, exact=True)",
        _shell("ensemble", source, clean, *answers, "--units", _comma(layers), "--exact"),
    )
    counts = sorted({count for count in (0, 1, 2, 4, 8, model.n_layers // 2) if count <= model.n_layers})
    yield Section(
        "lesion_curve",
        "How many layers can go?",
        "The loss on the clean prompt's own tokens as more layers are deleted at random, and, dashed, when a block of "
        "as many is cut out of the middle instead.",
        lambda bar: lesion_curve(model, clean, counts=counts, samples=8, progress=bar),
        f"rs.lesion_curve(model, {clean!r}, counts={counts!r}, samples=8)",
        _shell("lesion", source, clean, "--counts", _comma(counts), "--samples", "8"),
    )
    yield Section(
        "path_lengths",
        "How long are the paths that matter?",
        "The gradient of the logit difference is a sum over every path through the writes. Top left: how many "
        "paths there are of each length. Top right: what a single one carries, by sampling and by random signs. "
        "Bottom left: number times mean, with the range of lengths that holds 95% of it. Bottom right: what each "
        "length adds to the gradient, exactly and with its sign; where κ is large the lengths cancel, and only their "
        "sum means much.",
        lambda bar: path_lengths(model, clean, metric, samples=32, signs=4, progress=bar),
        f"rs.path_lengths(model, {clean!r}, {spelled}, samples=32, signs=4)",
        _shell("paths", source, clean, *answers, "--samples", "16", "--signs", "4"),
    )
    gauge = _gauge(model)
    yield Section(
        "logit_by_path_length",
        "Along how long a path does the answer build up?",
        f"{_FORWARD[gauge]} Each bar holds the paths of one length, and the line adds them up. Large bars of opposite "
        "signs are paths that undo each other.",
        lambda bar: logit_by_path_length(model, clean, answer, against, gauge=gauge, progress=bar),
        f"rs.logit_by_path_length(model, {clean!r}, {answer!r}, {against!r}, gauge={gauge!r})",
        _shell("logit-paths", source, clean, *answers, "--gauge", gauge),
    )


_INSIDE = {
    ("head",): "Each cell is one attention head",
    ("attn", "mlp"): "The heads of this model cannot be told apart, so this is each attention and MLP branch",
}


def _inside(model: ResidualModel) -> tuple[str, ...]:
    """Heads where the model has proved where they are, else whole branches."""
    try:
        model.require_inside("head")
    except UnsupportedModelError:
        return ("attn", "mlp")
    return ("head",)


_FORWARD: dict[Gauge, str] = {
    "frozen": "With norm scales, attention patterns and gates held fixed every branch is linear, and the logit "
    "difference is a sum over paths from the embedding, and from whatever begins in a branch.",
    "direct": "The branches of this model do not become linear when their activations are held fixed, so each counts "
    "as a whole: length 0 is what the embedding adds to the logit difference, length 1 what all branches do.",
}


def _gauge(model: ResidualModel) -> Gauge:
    """Frozen where the model's branches can be, else direct."""
    try:
        with model.frozen("mlp"):
            return "frozen"
    except UnsupportedModelError:
        return "direct"


def _most_needed(ablation: Result) -> list[int]:
    """The layers whose removal moved the metric most, in their own order."""
    effects = abs(ablation.data.effect.isel(prompt=0))
    return sorted(int(name) for name in effects.unit[effects.argsort().values[::-1][:ENSEMBLE]].values)


def _comma(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _about(model: ResidualModel, question: Question) -> dict[str, Any]:
    """Both prompts with their tokens, and what the model says after each."""
    clean, corrupted = (model.tokenize(prompt).strings[0] for prompt in (question.clean, question.corrupted))
    return {
        "runs": [
            _answers(model, name, getattr(question, name), question.answer, question.against)
            for name in ("clean", "corrupted")
        ],
        "differ": [one != other for one, other in zip(clean, corrupted, strict=False)],
        "answer": visible(question.answer),
        "against": visible(question.against),
    }


def _answers(model: ResidualModel, name: str, prompt: str, answer: str, against: str) -> dict[str, Any]:
    tokens = model.tokenize(prompt)
    right, wrong = (answer_ids(model, text, 1)[0] for text in (answer, against))
    with torch.no_grad():
        logits = wide(model.readout(at_last(model.trunk(tokens).run(), tokens, [0])))[0]
    probabilities = logits.softmax(-1)
    best = probabilities.topk(min(5, len(probabilities)))
    return {
        "name": name,
        "tokens": [visible(token) for token in tokens.strings[0]],
        "answer": float(probabilities[right]),
        "against": float(probabilities[wrong]),
        "difference": float(logits[right] - logits[wrong]),
        "top": [
            (visible(model.token_string(int(token))), float(probability))
            for token, probability in zip(best.indices, best.values, strict=True)
        ],
    }


def _versions() -> dict[str, str]:
    libraries = ("resstream", "torch", "transformers", "transformer-lens", "numpy", "xarray", "matplotlib")
    versions = {library: metadata.version(library) for library in libraries}
    return {**versions, "python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}


def _shell(name: str, source: str, *arguments: str) -> str:
    """A command line, quoted for a POSIX shell."""
    return shlex.join(["resstream", name, *arguments, "--model", source])
