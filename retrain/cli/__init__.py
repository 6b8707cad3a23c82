"""What you type and what you see: one file per command, arguments in, exit code out.

It takes words and hands on tables, live views and JSON (`render`), the only code that prints. It never
trains, supervises or computes a statistic itself.

A command is imported when it is named, because building all of them takes 40 ms. What takes long to import
it imports when it is called, so that help and completion are quick.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

COMMANDS = {  # in the order of `retrain --help`, each in the file of its name
    "init": "Write a commented campaign file to start from.",
    "explain": "Check a file and forecast its time and cost.",
    "calibrate": "Measure short real runs and recommend settings.",
    "run": "Run every condition with every seed.",
    "resume": "Continue a campaign that was stopped or killed.",
    "stop": "Stop a campaign; its workers save a checkpoint first.",
    "wait": "Wait until a campaign ends or needs attention.",
    "status": "Show which runs are done, running, failed or pending.",
    "board": "Show campaigns in a browser, live.",
    "logs": "Show a run's output.",
    "report": "Write a campaign's report as one HTML file.",
    "samples": "Show prompts and completions of a run.",
    "compare": "Compare conditions over their seeds.",
    "export": "Export every step of every run as one table.",
    "schema": "Print the JSON Schema of a campaign file.",
    "plugins": "List plugins and what they need, or check your own.",
    "states": "Show or delete the states that runs saved at an API.",
    "publish": "Write a run's policy for others, with a model card.",
    "squeeze": "Reduce the rank of a LoRA adapter.",
    "doctor": "Check for missing packages, keys and programs.",
}
CONVERSIONS: Mapping[Any, Callable[[Any], Any]] = {
    Path: Path,
    str: str,
    bool: bool,
    int: int,
    float: float,
    list[str]: tuple,
    list[Path]: lambda values: tuple(map(Path, values)),
}
NUMBERS: Mapping[Any, str] = {int: "a whole number", float: "a number"}
MOST_CONDITIONS = 30  # in tables and lists; --json has all
HELP = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """The commands of `retrain`, each imported and built when it is named."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(Any, dict.fromkeys(COMMANDS))  # names, for suggestions; None until built

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            function = importlib.import_module(f"retrain.cli.{cmd_name}").command
            app.command(cmd_name, cls=_Command, short_help=COMMANDS[cmd_name], context_settings=HELP)(
                function
            )
            self.commands[cmd_name] = typer.main.get_command(app)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and Path(f"{args[0]}.toml").is_file():
            ctx.fail(f"No such command {args[0]!r}. Did you mean the file {args[0]}.toml?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and what they are for, without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def get_params(self, ctx: Any) -> list[Any]:
        return [_convert_plainly(param) for param in super().get_params(ctx)]


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return [_convert_plainly(param) for param in super().get_params(ctx)]


def _convert_plainly(param: Any) -> Any:
    """Convert plain values without pydantic, whose import takes newer typers 80 ms; show no Python types."""
    if param.param_type_name == "argument":
        param.display_type_rich = lambda ctx: ""
    descriptor = getattr(param, "type_descriptor", None)
    if getattr(descriptor, "annotation", None) in CONVERSIONS:
        param.get_runtime_param = lambda: _Conversion(descriptor)
    return param


@dataclass(frozen=True, slots=True)
class _Conversion:
    descriptor: Any  # typer's

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return None
        kind, limits = self.descriptor.annotation, self.descriptor.parameter_info
        least, most = limits.min, limits.max
        with suppress(ValueError):
            converted = CONVERSIONS[kind](value)
            if kind not in NUMBERS:
                return converted
            if (least is None or converted >= least) and (most is None or converted <= most):
                return converted
        bounds = {"at least": least, "at most": most}
        range_of = " and ".join(f"{words} {limit:g}" for words, limit in bounds.items() if limit is not None)
        needs = f"needs {NUMBERS[kind]}{f' of {range_of}' if range_of else ''}"
        raise typer.BadParameter(f"got {value!r}; {needs}", ctx=ctx, param=param)


app = typer.Typer(
    name="retrain",
    cls=Commands,
    help="Plan, run and compare reinforcement-learning campaigns for language models.",
    epilog="`retrain FILE.toml` is `retrain run FILE.toml`. Start with: retrain init quickstart",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def _show_version(is_set: bool) -> None:
    if is_set:
        from retrain.base.distribution import version

        typer.echo(f"retrain {version()}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Plan, run and compare reinforcement-learning campaigns for language models."""
    del debug, version  # `retrain.__main__` reads --debug where it catches errors


def complete_keys() -> list[str]:
    """Return what `--set` may begin with; typer chooses what continues the words so far."""
    from retrain.config.keys import keys_of
    from retrain.config.reference import tables

    return [f"{name}.{key}=" for name, kind in tables() if name[0] != "[" for key in keys_of(kind)]


def complete_runs(ctx: typer.Context) -> list[str]:
    """Return the runs of the campaign named before."""
    return sorted(path.name for path in Path(ctx.params.get("directory") or ".").glob("runs/*"))


ConfigFile = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The campaign file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a value of the file; repeatable.",
        autocompletion=complete_keys,
    ),
]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, or its campaign's.")]
RunId = Annotated[
    str, typer.Argument(metavar="RUN-ID", help="Which run of a campaign.", autocompletion=complete_runs)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the same rows as JSON.")]
Over = Annotated[
    str,
    typer.Option(
        "--over",
        metavar="FROM:TO|whole|last",
        help="Compare means over this part of each run; last: a tenth, at least ten steps. Default: what "
        "[decision] compares, or last.",
        show_default=False,
    ),
]
Per = Annotated[
    str,
    typer.Option(
        "--per",
        metavar="steps|tokens|rollouts|seconds|usd",
        help="What --over counts, so that conditions are compared at equal amounts of it.",
        autocompletion=lambda: ["steps", "tokens", "rollouts", "seconds", "usd"],
    ),
]


def _positive(dollars: float | None) -> float | None:
    if dollars is None or 0 < dollars < math.inf:
        return dollars
    raise typer.BadParameter(f"got {dollars:g}; needs more than 0 dollars")


BudgetUsd = Annotated[
    float | None,
    typer.Option(
        "--budget-usd",
        metavar="DOLLARS",
        help="Stop before it costs more in all; sets [budget].usd.",
        callback=_positive,
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Run it in the background and return immediately.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that retrain did not write.")]


def permission(force: bool) -> Callable[[str], bool]:
    """Return what decides whether a foreign file may be overwritten: --force, else the user."""

    def may_replace(what: str) -> bool:
        if force or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return force
        return typer.confirm(f"{what}: exists, and retrain did not write it; overwrite?", err=True)

    return may_replace


def duration(span: str, option: str) -> float:
    """Read the time span of an option in seconds; an invalid one is a usage error."""
    from retrain.records.text import parse_duration

    try:
        return parse_duration(span)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
