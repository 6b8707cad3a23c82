"""Copy a row of symbols: `372=` -> `372`."""

from __future__ import annotations

from retrain.plugins.tasks.generated import task_of_symbols

build = task_of_symbols(str)
