"""MiCS in your own FSDP2 loop: torchrun --standalone --nproc-per-node 4 examples/own_loop.py

Four CPU processes play two nodes of two devices. On GPUs: init_process_group("nccl", device_id=...), and
connect(grid, device="cuda").
"""

import mics
import torch
import torch.distributed as dist
from torch import nn

NODE_DEVICES, MICRO_STEPS = 2, 4  # on real nodes the first is int(os.environ["LOCAL_WORLD_SIZE"])

dist.init_process_group("gloo")
torch.manual_seed(0)  # every replica starts with the same weights
blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1))

grid = mics.RankGrid(dist.get_world_size(), NODE_DEVICES, partition_size=4, hierarchical=True)
connection = mics.connect(grid)
mics.prepare_blocks(blocks, checkpointing="selective")  # optional
mics.apply(model, connection, blocks=blocks)
mics.check_replicas(model, connection)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

data = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has its own
for step in range(10):
    for micro in range(MICRO_STEPS):
        x = torch.randn(32, 8, generator=data)
        with mics.boundary(model, last=micro == MICRO_STEPS - 1):
            squared_error = (model(x) - x.sum(1, keepdim=True)).square().sum()
            (squared_error / (len(x) * MICRO_STEPS * dist.get_world_size())).backward()  # the mean over all ranks
    norm = mics.clip(model, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}  loss {squared_error / len(x):.3f}  norm {norm:.2f}")
        print({stage: (count.calls, count.traffic_bytes) for stage, count in connection.meter.take().items()})
dist.barrier()
dist.destroy_process_group()
