"""Write a row of symbols backwards: `372=` -> `273`."""

from __future__ import annotations

from retrain.plugins.tasks.generated import task_of_symbols

build = task_of_symbols(lambda row: row[::-1])
