"""MiCS in torchtitan 0.3.0: its llama3, sharded by `mics` where torchtitan would call FSDP.

In your config function: model_spec=torchtitan_mics.model_registry("8B"). Then, with p = 16 of 64 GPUs:
--parallelism.data_parallel_shard_degree 16 --parallelism.data_parallel_replicate_degree 4
--parallelism.spmd_backend partial_dtensor --training.disable_cuda_graphs
"""

import dataclasses
import itertools
import os

import mics
import torch
from torchtitan.config import TORCH_DTYPE_MAP as DTYPES
from torchtitan.distributed.compile import apply_compile
from torchtitan.models import llama3


def parallelize_mics(model, *, parallel_dims, training, parallelism, compile_config, ac_config, dump_folder):
    n, p = parallel_dims.world_size, parallel_dims.dp_shard
    if n != p * parallel_dims.dp_replicate or parallelism.spmd_backend != "partial_dtensor":
        raise ValueError("mics shards dense models by data only, with parallelism.spmd_backend partial_dtensor")
    if not training.disable_cuda_graphs:
        raise ValueError("a captured graph cannot skip hop 2: set training.disable_cuda_graphs")
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    grid = mics.rank_grid("mics", world_size=n, devices_per_node=int(os.environ["LOCAL_WORLD_SIZE"]), partition=p)
    param, reduce = DTYPES[training.mixed_precision_param], DTYPES[training.mixed_precision_reduce]
    connection = mics.connect(grid, device="cuda" if torch.cuda.is_available() else "cpu")
    mics.apply(model, connection, blocks=model.layers.values(), gather_dtype=param, reduce_dtype=reduce)

    micro_steps = max(1, training.global_batch_size // (training.local_batch_size * n))
    forwards = itertools.count(1)

    def at_boundary(*_):  # torchtitan's loop does not say which micro-step is the last, so count them
        if torch.is_grad_enabled():
            model.set_requires_all_reduce(next(forwards) % micro_steps == 0)

    model.register_forward_pre_hook(at_boundary)
    return model


def model_registry(flavor, **options):
    return dataclasses.replace(llama3.model_registry(flavor, **options), parallelize_fn=parallelize_mics)
