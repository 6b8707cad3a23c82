"""`retrain samples`: prompts, completions and rewards of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer
from typer import Option

from retrain.cli import AsJson, RunDirectory, RunId

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from retrain.records.samples import KeptSample
    from retrain.results.status.one_run import Which


def command(
    directory: RunDirectory,
    run: RunId = "",
    step: int | None = Option(
        None, "--step", min=0, metavar="N", help="Samples of this step; default: the last."
    ),
    best: bool = Option(False, "--best", help="Highest rewards first, over all kept steps."),
    worst: bool = Option(False, "--worst", help="Lowest rewards first, over all kept steps."),
    ties: bool = Option(False, "--ties", help="Only prompts whose rollouts all got the same reward."),
    source: str = Option("", "--source", metavar="NAME", help="Only prompts of this [[data.source]]."),
    count: int = Option(8, "--count", "-n", min=1, metavar="N", help="Maximum number of samples."),
    as_json: AsJson = False,
) -> None:
    """Show samples of a run: prompt, completion, reward and advantage.

    A run keeps some rollouts of its first steps, of its last, and of evenly spaced steps between.

    Example: retrain samples logs/campaign-20260101T120000Z-1a2b grpo_s0 --worst
    """
    from retrain.base.errors import ConfigError
    from retrain.cli.render.tables import console, print_result
    from retrain.results.status.one_run import choose_samples, find_run

    flags: dict[Which, bool] = {"best": best, "worst": worst, "ties": ties}
    which, *others = [which for which, is_set in flags.items() if is_set] or [""]
    if others:
        raise ConfigError(f"--{which} --{others[0]}: use only one of them")
    samples = choose_samples(find_run(directory, run), step, which, count, source)
    if as_json:
        print_result(samples, "samples")
    elif samples:
        _show(samples, console())
    else:
        typer.echo("no kept sample " + ("belongs to a tied prompt" if ties else "has a reward"))


def _parts(sample: KeptSample) -> Iterator[tuple[str, str]]:
    """Iterate over prompt, answer and completion, or the turns of an episode, each with its name."""
    yield "prompt", sample.prompt
    yield "answer", sample.answer
    if sample.parts:
        shown = ((name, "unscored" if part is None else f"{part:g}") for name, part in sample.parts.items())
        yield "parts", "  ".join(f"{name} {part}" for name, part in shown)
    if not sample.turns:
        yield "wrote", sample.completion
    for number, turn in enumerate(sample.turns, 1):
        notes = [] if turn.reward is None else [f"reward {turn.reward:g}"]
        notes += ["cut at max_turn_tokens"] if turn.cut else []
        yield f"turn {number}", turn.policy + (f"   ({', '.join(notes)})" if notes else "")
        if turn.environment:
            yield "observed", turn.environment
    if sample.unscored and not sample.error:
        yield "unscored", sample.unscored
    if sample.sign:
        yield "sign", sample.sign
    if sample.error:
        yield "failed", sample.error


def _show(samples: Sequence[KeptSample], console: Console) -> None:
    """Print samples, each with its step, prompt, reward and advantage."""
    from rich.text import Text

    from retrain.records.text import number, plain

    for sample in samples:
        of_source = f" of {plain(sample.source)}" if sample.source else ""
        line = Text(f"step {sample.step}  prompt {sample.prompt_id}{of_source}  reward ", style="bold")
        if sample.reward is None:
            line.append("unscored", style="yellow")
        else:
            line.append(number(sample.reward), style="green" if sample.reward > 0 else "red")
        advantage = "-" if sample.advantage is None else f"{sample.advantage:+.3f}"
        facts = [f"advantage {advantage}", *sample.extent, f"{sample.tokens} tokens"]
        line.append("".join(f"  {fact}" for fact in facts))
        if sample.tie:
            line.append("  tie: no learning signal", style="yellow")
        if sample.truncated:
            line.append("  truncated", style="yellow")
        console.print(line, soft_wrap=True)
        lines = list(_parts(sample))
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            style = "cyan" if name == "observed" else ""
            for place, row in enumerate(_rows(text, style, console, width + 3)):
                console.print(Text(f"  {'' if place else name:<{width}} ").append(row), soft_wrap=True)
        console.print()


def _rows(text: str, style: str, console: Console, indent: int) -> Iterator[Text]:
    """Iterate over a text's lines as they fit beside its name; a pipe gets them whole."""
    from rich.text import Text

    from retrain.records.text import plain_lines

    for line in plain_lines(text) or ["(empty)"]:
        whole = Text(line, style)
        yield from whole.wrap(console, max(20, console.width - indent)) if console.is_terminal else [whole]
