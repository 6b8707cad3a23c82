"""Print the estimated and the measured peak memory of a run whose completions are as long as they may be."""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from retrain.backends import BackendSpec, Optimization, Sampling, local
from retrain.base import registry
from retrain.base.rollouts import Loss, Prompt, TrainingSample
from retrain.config.schema import BackendSection, Config, ModelSection, TrainingSection

PROMPTS, GROUP, TOKENS = 2, 4, 16
OPTIONS = {"device": "cpu", "local_files_only": True, "chat_template": True}

prompts = [
    Prompt(number, f"Tell me a long story about the number {number}.", "") for number in range(PROMPTS)
]
config = Config(
    model=ModelSection(model=sys.argv[1]),
    training=TrainingSection(batch_size=PROMPTS, group_size=GROUP, max_tokens=TOKENS),
    backend=BackendSection(backend="local", options=OPTIONS),
)
backend = local.connect(BackendSpec(seed=0, model=sys.argv[1], options=OPTIONS))
samples = [
    TrainingSample(rollout, np.full(len(rollout.tokens), float(number % 2)), 0.01, number)
    for number, group in enumerate(backend.sample(prompts, Sampling(GROUP, TOKENS, 1.0)))
    for rollout in group.rollouts
]
loss = Loss("ppo", partial(registry.find_plugin("losses", "ppo")))
for _ in range(2):  # the optimizer's moments are there from the second on
    backend.update(samples, loss, Optimization(lr=1e-5))
# not ru_maxrss, which a process inherits from the one that started it
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(local.memory(config, prompts).peak, 1024 * int(status["VmHWM"].split()[0]))
