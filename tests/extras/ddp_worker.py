"""One replica of DistributedDataParallel runs whose gradients are dictated; writes what the rule found.

Usage: ddp_worker.py RENDEZVOUS_FILE RANK OUTPUT_FILE < plans.json
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from retrain.trainer.torch_scaling import AdaScale

OTHER_STARTS = timedelta(minutes=5)


class Linear(torch.nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.weight @ gradient


def train(plan: dict, rank: int) -> list[dict]:
    model = DistributedDataParallel(Linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=plan["lr"])
    rule = AdaScale()
    rule.initialize(model, optimizer, accum_scale=plan["accum_scale"])
    rows = []
    for step in plan["steps"]:
        before = model.module.weight.detach().clone()
        mine = step[rank]
        for index, gradient in enumerate(mine):
            is_last = index == len(mine) - 1
            with nullcontext() if is_last or not plan["no_sync"] else model.no_sync():
                model(torch.tensor(gradient)).backward()
        rule.step()
        delta = (model.module.weight.detach() - before).tolist()
        sqr, var = rule.noise.sqr.tolist(), rule.noise.var.tolist()
        rows.append({"sqr": sqr, "var": var, "progress": rule.progress, "delta": delta})
        rule.zero_grad()
    assert optimizer.param_groups[0]["lr"] == plan["lr"]
    return rows


def refusals(rendezvous: str) -> list[str]:
    """Return what the rule says of models that are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    shards, said = torch.nn.Linear(3, 2), []
    fully_shard(shards, mesh=init_device_mesh("cpu", (1,)))
    wrapped = FullyShardedDataParallel(torch.nn.Linear(3, 2), device_id=torch.device("cpu"))
    for model in (shards, wrapped):
        try:
            AdaScale().initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ValueError as error:
            said.append(str(error))
    distributed.destroy_process_group()
    return said


def replica(rendezvous: str, rank: int, plans: list[dict]) -> list[list[dict]]:
    """Return what one of two replicas finds."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=OTHER_STARTS
    )
    found = [train(plan, rank) for plan in plans]
    distributed.barrier()
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(replica(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin))))
