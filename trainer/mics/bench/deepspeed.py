"""DeepSpeed's ZeRO-3 as a contender, and ZeRO++'s secondary partition (hpZ, arXiv 2306.10209, section 3.2).

fp32 or bf16, torch's AdamW, everything else at DeepSpeed's defaults, but where an entry forces the second gather. At
its defaults DeepSpeed keeps the weights of a model of less than about 1e9 parameters from the forward to the backward
pass. For that three limits have to be large in comparison, and an entry makes them as small as they are beside a large
model: `stage3_max_reuse_distance`, and how far the prefetch may go, since what it would have fetched is kept too.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

from mics.bench.contender import Contender, Setting
from mics.config import RunConfig
from mics.entries import Entry
from mics.errors import RunRefusedError
from mics.init import materialise
from mics.optim import adamw


def check_deepspeed(run: RunConfig) -> None:
    """Raises RunRefusedError where DeepSpeed is not installed, or in a precision that is not compared."""
    if run.precision not in ("fp32", "bf16"):
        raise RunRefusedError(f"DeepSpeed is compared in fp32 and bf16, not in {run.precision}")
    if importlib.util.find_spec("deepspeed") is None:
        raise RunRefusedError(
            "DeepSpeed is not installed here; it comes with the extra bench: pip install micsctl[bench]"
        )


def zero_config(entry: Entry, run: RunConfig, *, block_parameters: int) -> dict[str, Any]:
    """The configuration that DeepSpeed gets for an entry; `block_parameters` are those of one block. Pure."""
    zero = {"stage": 3}
    if entry.second_gather:
        zero["stage3_max_reuse_distance"] = 0
        zero["stage3_prefetch_bucket_size"] = block_parameters // 4
        zero["stage3_max_live_parameters"] = block_parameters // 2
    if entry.strategy == "deepspeed-hpz":
        zero["zero_hpz_partition_size"] = run.devices_per_node
    return {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": entry.micro_steps,
        "gradient_clipping": run.train.clip,
        "bf16": {"enabled": run.precision == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _imported(setting: Setting) -> Any:
    """DeepSpeed, quiet, on this device, without a compiler."""
    if setting.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_SIZE"] = str(setting.place.local_world_size)  # else it starts numactl in every reduction
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # it calls collectives by their old names
    if setting.device.type == "cpu":
        # It would compile a shared-memory all-reduce for inference where it finds a compiler.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    return deepspeed


class DeepSpeed(Contender):
    """Collective over all ranks, as all contenders. Every rank holds the whole model for a moment."""

    def __init__(self, entry: Entry, setting: Setting) -> None:
        run, deepspeed = setting.run, _imported(setting)
        self.built, self._world_size = setting.build(), run.world_size
        materialise(self.built.model, self.built.fill, seed=run.train.seed, device=setting.device)
        optimizer = adamw(self.built.model, lr=run.train.lr, weight_decay=run.train.weight_decay)
        config = zero_config(entry, run, block_parameters=self.built.block_parameters // len(self.built.blocks))
        plain = functional.linear
        self._engine, *_ = deepspeed.initialize(model=self.built.model, optimizer=optimizer, config=config)
        # Two things that it leaves in the process: its own `linear`, which the other contenders must not get, and the
        # groups of hpZ, which every later engine would use, whatever its configuration says.
        self._linear, functional.linear = functional.linear, plain
        deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None

    def micro_step(self, inputs: Tensor, targets: Tensor, tokens: Tensor, *, last: bool) -> Tensor:
        with self._own_linear():
            loss = self.built.summed_loss(self._engine, inputs, targets) / tokens
            # It averages over the ranks; the micro-steps are in `tokens` already.
            self._engine.backward(loss * self._world_size, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # it counts the micro-steps itself
        return loss.detach()

    def update(self) -> None:
        self._engine.step()

    @contextmanager
    def _own_linear(self) -> Iterator[None]:
        plain, functional.linear = functional.linear, self._linear
        try:
            yield
        finally:
            functional.linear = plain

    def close(self) -> None:
        self._engine.destroy()
