"""What stands out in a result, as tables of text: one or two for each prompt, or some for all of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resstream.result import Result

MOST = 10
_ORDINALS = ("best", "2nd", "3rd", *(f"{number}th" for number in range(4, 100)))


@dataclass(frozen=True)
class Table:
    """A title, the names of columns, and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(result: Result) -> Iterator[Table]:
    """The tables of a result."""
    if result.measure.startswith("lab."):
        yield from _claims(result)
        return
    if result.measure in _WHOLE:
        yield from _WHOLE[result.measure](result)
        return
    for prompt in range(result.data.sizes["prompt"]):
        yield from _TABLES[result.measure](result, prompt)


def print_table(table: Table) -> None:
    """Write a table to the terminal, within its width."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=SIMPLE_HEAD, show_edge=False)
    for column in table.columns:
        grid.add_column(Text(column), overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    # A file or a pipe has no width to fit into.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    console.print(Text(table.title, style="italic"), grid, "", sep="\n")


def _claims(result: Result) -> Iterator[Table]:
    """What an experiment found of its claims."""
    names = ("row", "says", "expected", "found", "verdict")
    rows = [
        (*(str(claim[name]) for name in names[:-1]), ": ".join(filter(None, (claim["verdict"], claim["because"]))))
        for claim in result.settings["claims"]
    ]
    if rows:
        yield Table("Claims", ("claim", "says", "figure there", "figure here", "verdict"), rows)


def _lens(result: Result, prompt: int) -> Iterator[Table]:
    """What every site would say after the last token, the last site on top."""
    from resstream.plots.canvas import visible

    data = result.data.isel(prompt=prompt)
    last = data.isel(position=int(data.length) - 1)
    rows = []
    for number in reversed(range(last.sizes["site"])):
        here = last.isel(site=number)
        best = zip(here.top_string.values, here.top_log_prob.values, strict=True)
        target = f"{math.exp(float(here.log_prob)):.3f}", str(int(here["rank"]))
        rows.append((str(here.site.values), *target, *(f"{visible(token)} {math.exp(p):.3f}" for token, p in best)))
    columns = ("site", f"P({visible(str(last.target_string.values))})", "rank", *_ORDINALS[: last.sizes["top"]])
    yield Table(f"Prompt {prompt}: next token after {visible(str(last.token.values))!r}", columns, rows)


def _patching(result: Result) -> Iterator[Table]:
    """The cells with the largest effects on each metric: of a pair, or of several with their intervals."""
    several = result.data.sizes["prompt"] > 1
    effect = "mean_effect" if several else "effect"
    frame = result.to_dataframe(effect)
    frame = frame.reindex(frame[effect].abs().sort_values(ascending=False, kind="stable").index).dropna(subset=effect)
    metrics = result.data.metric_name.values if "metric_name" in result.data.dims else [None]
    for number, name in enumerate(metrics):
        rows = []
        for row in (frame if name is None else frame[frame["metric_name"] == name])[:MOST].to_dict("records"):
            part = "".join(f".{row[part]}" for part in ("head", "neuron") if part in row)
            where = (str(row["position"]), _token_at(result, row["position"])) if "position" in row else ()
            more = f"{row['effect_low']:+.3f} to {row['effect_high']:+.3f}" if several else f"{row['metric']:.3f}"
            rows.append((f"{row['layer']}.{row['site']}{part}", *where, f"{row[effect]:+.3f}", more))
        if not rows:
            continue
        placed = ("position", "token") if "position" in frame else ()
        columns = ("site", *placed, "effect", "95% interval" if several else _metric_column(result, number))
        of = f"Mean of {result.data.sizes['prompt']} pairs" if several else "Pair 0"
        about = f" on {_metric_column(result, number)}" if several or name is not None else ""
        yield Table(f"{of}: the largest effects{about}", columns, rows)


def _token_at(result: Result, position: object) -> str:
    """The token at a position, both where the runs differ, or nothing where pairs do."""
    from resstream.plots.canvas import visible

    here = result.data.sel(position=position)
    texts = here.token.values, here.corrupted_token.values
    pairs = {(visible(str(a)), visible(str(b))) for a, b in zip(*texts, strict=True)}
    return _pair(*pairs.pop()) if len(pairs) == 1 else ""


def _ablation(result: Result, prompt: int) -> Iterator[Table]:
    """The units with the largest effects."""
    data = result.data.isel(prompt=prompt)
    rows = [
        (str(data.unit.values[n]), f"{float(data.effect[n]):+.3f}", f"{float(data.metric[n]):.3f}")
        for n in _largest(data.effect.values.tolist())
    ]
    base = f"Prompt {prompt}: the largest effects; whole model {float(data.base):.3f}"
    yield Table(base, ("removed", "effect", _metric_column(result)), rows)


def _lesions(result: Result) -> Iterator[Table]:
    """Each lesion, as a mean over prompts and draws."""
    rows = []
    for number in range(result.data.sizes["lesion"]):
        here = result.data.isel(lesion=number)
        low, high = float(here.effect_low), float(here.effect_high)
        interval = f"{low:+.3f} to {high:+.3f}" if low < high else ""
        control, moved = f"{float(here.effect_control_mean):+.3f}", f"{float(here.kl_mean):.3f}"
        kept = f"{float(here.top1_mean):.0%}"
        rows.append((str(int(here.lesion)), f"{float(here.effect_mean):+.3f}", interval, control, moved, kept))
    whole = f"Loss of the whole model {float(result.data.base_loss.mean()):.3f} nats"
    columns = ("count", "loss, change", "95% interval", "control", "KL", "top-1 kept")
    yield Table(f"{whole}; {result.settings['counted']}; control: {result.settings['control']}", columns, rows)


def _health(result: Result) -> Iterator[Table]:
    """Each pitfall: whether it was found, by what, and what to do about those that were."""
    data = result.data
    columns = (data.pitfall.values, data.found.values, data.evidence.values, data.advice.values)
    rows = []
    for pitfall, found, evidence, advice in zip(*columns, strict=True):
        said = f"{evidence}. To do: {advice}" if found else str(evidence)
        rows.append((str(pitfall), "FOUND" if found else "no", said))
    yield Table(f"Pitfalls, looked for in {result.settings['tokens']} tokens", ("pitfall", "found", "evidence"), rows)


def _ensemble(result: Result, prompt: int) -> Iterator[Table]:
    """The units that are worth most, and where every subset was run the pairs that depend on each other most."""
    data, unit = result.data.isel(prompt=prompt), str(result.settings["unit"])
    names, half = [str(name) for name in data.unit.values], data.shapley_high - data.shapley
    rows = []
    for n in _largest(data.shapley.values.tolist()):
        interval = () if result.settings["exact"] else (f"± {float(half[n]):.2g}",)
        rows.append((names[n], f"{float(data.shapley[n]):+.3f}", *interval))
    columns = (unit, f"Shapley value ({result.settings['units']})", *(() if result.settings["exact"] else ("95%",)))
    ends = f"all {float(data.level_mean[-1]):.3f}, none {float(data.level_mean[0]):.3f}"
    yield Table(f"Prompt {prompt}: the {unit}s that are worth most; {ends}", columns, rows)
    if "interaction" in data and len(names) > 1:
        pairs = [(a, b) for a in range(len(names)) for b in range(a)]
        values = [float(data.interaction[a, b]) for a, b in pairs]
        rows = [(names[pairs[n][1]], names[pairs[n][0]], f"{values[n]:+.3f}") for n in _largest(values)]
        title = f"Prompt {prompt}: the strongest interactions; below 0, less together than the sum of each"
        yield Table(title, (unit, "and", f"interaction ({result.settings['units']})"), rows)


def _paths(result: Result, prompt: int) -> Iterator[Table]:
    """The lengths that weigh most, by the norm of what they carry together, and the most of attention and MLP hops."""
    data = result.data.isel(prompt=prompt)
    sampled = ("rms", "path_norm", "veit")
    names = ("count", "norm", "share", *(name for name in sampled if bool(data[name].notnull().any())))
    rows = [
        (str(n), *_figures(float(data[name][n]) for name in names)) for n in sorted(_largest(data.norm.values.tolist()))
    ]
    yield Table(f"Prompt {prompt}: the lengths with the largest norm", ("length", "paths", *names[1:]), rows)
    if "branch_norm" in data:
        width = data.sizes["mlp_hops"]
        cells = [divmod(n, width) for n in _largest(data.branch_norm.values.ravel().tolist())]
        both = (data.branch_norm, data.branch_share)
        rows = [(str(attn), str(mlp), *_figures(float(each[attn, mlp]) for each in both)) for attn, mlp in cells]
        title = f"Prompt {prompt}: the numbers of hops with the largest norm"
        yield Table(title, ("attention hops", "MLP hops", "norm", "share"), rows)


def _logit_paths(result: Result, prompt: int) -> Iterator[Table]:
    """The lengths with the largest terms, by where their paths begin, and what they sum up to on the way."""
    data = result.data.isel(prompt=prompt)
    kinds = [str(source).rpartition(".")[2] for source in data.source.values]
    total = float(data.constant) + data.term.values.cumsum()
    begin = {kind: data.term_from.values[[each == kind for each in kinds]].sum(0) for kind in dict.fromkeys(kinds)}
    rows = []
    for n in sorted(_largest(data.term.values.tolist())):
        values = (float(data.term[n]), *(float(part[n]) for part in begin.values()), float(total[n]))
        # Adding 0 takes the sign off what rounds to nothing.
        rows.append((str(n), *(f"{round(value, 3) + 0.0:+.3f}" for value in values)))
    title = f"Prompt {prompt}: the lengths with the largest terms; {result.settings['metric']} {float(data.logit):.3f}"
    yield Table(title, ("length", "term", *(f"from {kind}" for kind in begin), "sum so far"), rows)


_WHOLE: dict[str, Callable[[Result], Iterator[Table]]] = {
    "patch_activations": _patching,
    "attribution_patching": _patching,
    "lesion_curve": _lesions,
    "stream_health": _health,
}
_TABLES: dict[str, Callable[[Result, int], Iterator[Table]]] = {
    "logit_lens": _lens,
    "ablate_layers": _ablation,
    "layer_ensemble": _ensemble,
    "path_lengths": _paths,
    "logit_by_path_length": _logit_paths,
}


def _largest(values: Sequence[float]) -> list[int]:
    """The places of the largest sizes, the largest first."""
    return sorted(range(len(values)), key=lambda place: -abs(values[place]))[:MOST]


def _figures(values: Iterable[float]) -> list[str]:
    return [f"{value:.3g}" for value in values]


def _pair(clean: str, corrupted: str) -> str:
    return clean if clean == corrupted else f"{clean} -> {corrupted}"


def _metric_column(result: Result, number: int = 0) -> str:
    """A metric with its units, the one of that number where there are several."""
    both = (result.settings[name] for name in ("metric", "units"))
    metric, units = (each if isinstance(each, str) else each[number] for each in both)
    return f"{metric} ({units})"
