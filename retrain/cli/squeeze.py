"""`retrain squeeze`: how much rank a LoRA adapter uses, and a smaller adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from retrain.cli import AsJson

if TYPE_CHECKING:
    from retrain.backends.squeeze import Retained


@dataclass
class Squeezed:
    """What was measured and written."""

    adapter: str
    layers: int
    untrained_layers: int
    size_bytes: int
    ranks: list[Retained]
    recommended: Retained
    written: str = ""
    written_rank: int = 0
    written_bytes: int = 0
    output_error: float | None = None  # worst layer, relative, on random inputs


def command(
    adapter: Path = Argument(metavar="ADAPTER", help="A peft adapter's or a run's directory.", exists=False),
    output: Path | None = Option(
        None, "-o", "--output", metavar="DIR", help="Write the smaller adapter to this directory."
    ),
    rank: int | None = Option(
        None, min=1, metavar="N", help="Rank of the smaller adapter; default: the recommended one."
    ),
    keep: float = Option(
        0.99, min=0.0, max=1.0, metavar="FRACTION", help="Variance that the worst layer must retain."
    ),
    as_json: AsJson = False,
) -> None:
    """Show how much of a LoRA adapter's variance each rank retains; with -o, write a smaller adapter.

    The recommended rank is the smallest whose worst layer retains --keep. The new adapter is in peft's
    format; it is read back and its outputs are compared with the original's.

    Example: retrain squeeze logs/RUN/runs/grpo_s0 -o adapter-r8
    """
    from retrain.backends.squeeze import analyse, output_error, read_adapter, squeezed, write_adapter
    from retrain.base.errors import ConfigError
    from retrain.cli.render.tables import print_result
    from retrain.config.files import PEFT, weights_of

    if output is not None and (output.exists() or output.is_symlink()):  # before hours of linear algebra
        raise ConfigError(f"{output}: exists; name a directory that does not")
    weights = weights_of(adapter)  # of a run, the newest
    directory = weights.parent if weights is not None and weights.name == PEFT else adapter
    original = read_adapter(directory)
    spectrum = analyse(original)
    recommended, largest = spectrum.recommended(keep), spectrum.rank
    halves = {max(1, largest >> shift) for shift in range(largest.bit_length())}
    ranks = sorted(halves | {min(rank or largest, largest), recommended.rank})
    result = Squeezed(
        adapter=str(directory),
        layers=len(spectrum.layers),
        untrained_layers=len(spectrum.layers) - len(spectrum.trained),
        size_bytes=original.size_bytes,
        ranks=[spectrum.at(each) for each in ranks],
        recommended=recommended,
    )
    if output is not None:
        write_adapter(squeezed(original, rank or recommended.rank), output)
        written = read_adapter(output)
        result.written, result.written_bytes = str(output), written.size_bytes
        result.written_rank = max(layer.rank for layer in written.layers)
        result.output_error = output_error(original, written)
    if as_json:
        print_result(result)
    else:
        _show(result, keep)


def _show(result: Squeezed, keep: float) -> None:
    """Print the table of ranks and what follows from it."""
    from retrain.cli.render.tables import console, table
    from retrain.records.text import plain

    out, rows = console(), []
    for each in result.ranks:
        mark = " *" if each.rank == result.recommended.rank else ""
        shares = f"{each.mean_fraction:.2%}", f"{each.worst_fraction:.2%}"
        rows.append((f"{each.rank}{mark}", *shares, each.worst_layer))
    columns = (">rank", ">retained, mean", ">worst layer", "in layer")
    # not the table's title, which would be broken at its width
    out.print(f"{plain(result.adapter)}: {result.layers} layers", soft_wrap=True)
    out.print(table("", columns, rows))
    if result.untrained_layers:
        out.print(f"{result.untrained_layers} layers have not been trained: their update is zero")
    out.print(f"* the smallest rank whose worst layer retains {keep:.2%}")
    if result.written:
        out.print(
            f"wrote {plain(result.written)}: rank {result.written_rank}, {result.written_bytes / 1e6:.2f} MB "
            f"of {result.size_bytes / 1e6:.2f} MB, outputs differ by {result.output_error:.2%} at most"
        )
