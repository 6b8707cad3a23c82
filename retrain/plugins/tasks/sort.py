"""Sort a row of digits: `372=` -> `237`."""

from __future__ import annotations

from retrain.plugins.tasks.generated import task_of_symbols

build = task_of_symbols(lambda row: "".join(sorted(row)))
