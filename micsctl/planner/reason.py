"""The reason of a plan, and of a refusal, in words. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mics.config import TrainConfig
from mics.strategies import free_partition
from mics.topology import RankGrid

from micsctl.errors import UsageError
from micsctl.planner.model import Candidate, Machines, Memory
from micsctl.planner.partition import MARGIN, MICRO_BATCHES, Choice, MemoryOf, fits, memory_limit_bytes

MOST_NODES = 1000  # as many as mics.yaml allows
_AS_WITH_A_FREE_P = "as strategy mics gets it with a free p, or what needs less memory where that does not fit."


def of_plan(
    asked: TrainConfig, resolved: TrainConfig, machines: Machines, grid: RankGrid, weighed: Sequence[Candidate]
) -> str:
    """Why this p, where its gathers run, why this micro-batch, checkpointing and precision. One paragraph."""
    sentences = [
        *_size(asked, machines, grid.partition_size, weighed),
        _place(grid),
        *_kept(resolved, grid),
        *_micro_batch(asked, resolved, grid),
        *_checkpointing(asked, resolved, grid),
        *_precision(asked, resolved, machines),
    ]
    return " ".join(sentences)


def of_unweighed(asked: TrainConfig, resolved: TrainConfig, machines: Machines, grid: RankGrid) -> str:
    """The same for a model that only the nodes can build."""
    p = grid.partition_size
    sentences = [
        f"p = {p}{_origin(asked)}: only the nodes can build {asked.model}; its memory and traffic are not predicted.",
        _place(grid),
        *_kept(resolved, grid),
    ]
    if asked.checkpointing == "auto":
        sentences.append("No activation is computed again: train.checkpointing: full asks for it.")
    return " ".join([*sentences, *_precision(asked, resolved, machines)])


def cannot_be_weighed(train: TrainConfig, missing: Sequence[str]) -> UsageError:
    """The error for a model that only the nodes can build, where the plan would have to know its memory."""
    return UsageError(
        f"{train.model} cannot be planned for without {' and '.join(missing)}",
        "only the nodes can build it, so its size is not known here",
        next=", ".join(f"{key}: a number" for key in missing) + "   (model states take 16 bytes a parameter over p)",
    )


def fits_nowhere(train: TrainConfig, machines: Machines, least: Choice, memory_of: MemoryOf) -> UsageError:
    """The error for a model that does not fit even at p = n with all else as small as it may be."""
    n, micro_batch = machines.world_size, least.micro_batch
    needed = memory_of(n, micro_batch, least.checkpointing)
    enough = _enough_nodes(machines, least, memory_of)
    again = "" if least.checkpointing == "none" else f", checkpointing {least.checkpointing}"
    why = [
        f"at p = {n}, the largest, and micro-batch {micro_batch}{again} a device needs {_memory(needed.total)}: "
        f"{_memory(needed.states)} of model states and {_memory(needed.total - needed.states)} that p does not divide",
        f"planned with: {_limit(machines)}",
    ]
    advice = [f"cluster.nodes: {enough} (or more)"] if enough else []
    advice += ["a smaller train.micro_batch"] if micro_batch > 1 else []
    advice += ["train.reshard_after_forward: true"] if train.reshard_after_forward not in (True, "auto") else []
    advice += ["train.checkpointing: full"] if least.checkpointing != "full" else []
    advice += ["a shorter train.sequence", "devices with more memory"]
    if not enough:
        why.append("no number of nodes helps: what p does not divide fills the device")
        advice.append("a tool with tensor parallelism, such as torchtitan or Megatron-LM")
    return UsageError(
        f"{_name(train)} does not fit {machines.nodes} x {machines.devices_per_node} {machines.device}",
        "\n".join(why),
        next=", or ".join(advice),
    )


def strategy_does_not_fit(
    train: TrainConfig, machines: Machines, asked: int, free: Choice, needed: Memory
) -> UsageError:
    """The error for a strategy that fixes p to what does not fit, while a larger p does."""
    return UsageError(
        f"{_name(train)} does not fit with strategy {train.strategy}",
        f"its p = {asked} needs {_memory(needed.total)} per device; planned with: {_limit(machines)}",
        next=f"train.strategy: mics (fits at p = {free.partition_size}), or train.partition: {asked} to try it anyway",
    )


def _size(asked: TrainConfig, machines: Machines, p: int, weighed: Sequence[Candidate]) -> list[str]:
    chosen = next(c for c in weighed if c.partition_size == p)
    smaller = [c for c in weighed if c.partition_size < p]
    states_bytes, parameters = chosen.memory.states * p, _parameters(asked)
    head = (
        f"p = {p}{_origin(asked)}: {states_bytes / parameters:.0f} bytes of model states for each of "
        f"{_count(parameters)} parameters are {_memory(states_bytes)}; a device is planned with {_limit(machines)}."
    )
    need = f"p = {p} needs {_memory(chosen.memory.total)} in all"
    if not chosen.fits:
        return [head, f"Warning: {need}, more than that; the run may end out of memory."]
    if asked.partition != "auto" or not free_partition(asked.strategy):
        return [head, f"{need}."]
    if not smaller:
        return [head, f"{need}, so nothing has to be sharded."]
    before = smaller[-1]
    return [
        head,
        f"{need} and is the smallest that fits: p = {before.partition_size} needs {_memory(before.memory.total)}.",
    ]


def _origin(asked: TrainConfig) -> str:
    if asked.partition != "auto":
        return ", as train.partition says"
    return "" if free_partition(asked.strategy) else f", as strategy {asked.strategy} fixes it"


def _place(grid: RankGrid) -> str:
    p, k = grid.partition_size, grid.devices_per_node
    replicas = f"{grid.replicas} replicas" if grid.replicas > 1 else "one replica"
    if p == 1:
        return f"Every device holds a replica ({replicas})." if grid.replicas > 1 else "There is one device."
    if p < k:
        return f"{k // p} partition groups share one node, so gathers stay inside it ({replicas})."
    if p == k:
        return f"{p} devices fill one node, so gathers stay inside it ({replicas})."
    stages = "in two stages, across nodes and inside them" if grid.hierarchical else "in one flat stage"
    return f"A partition group fills {grid.nodes_per_partition} nodes, so gathers cross nodes, {stages} ({replicas})."


def _micro_batch(asked: TrainConfig, resolved: TrainConfig, grid: RankGrid) -> list[str]:
    if asked.micro_batch != "auto":
        return []
    tried = ", ".join(map(str, MICRO_BATCHES))
    if asked.partition == "auto" and free_partition(asked.strategy):
        inside = " while p stays inside a node" if grid.partition_size <= grid.devices_per_node else ""
        return [f"Micro-batch {resolved.micro_batch}: the largest of {tried} that fits{inside}."]
    return [f"Micro-batch {resolved.micro_batch}: {_AS_WITH_A_FREE_P}"]


def _kept(resolved: TrainConfig, grid: RankGrid) -> list[str]:
    """What it costs that gathered weights are not freed after the forward pass."""
    kept = resolved.reshard_after_forward
    if resolved.strategy == "zero2":
        return ["Weights are gathered once and kept until the optimizer step, as strategy zero2 does."]
    if kept is True or grid.partition_size == 1:
        return []
    if kept is False:
        return ["Gathered weights are kept for the backward pass, so a device holds the whole model's."]
    return [f"Between forward and backward {kept} devices of a node share one copy, so only one gather crosses nodes."]


def _checkpointing(asked: TrainConfig, resolved: TrainConfig, grid: RankGrid) -> list[str]:
    if asked.checkpointing != "auto":
        return []
    if asked.partition != "auto" or not free_partition(asked.strategy):
        head = f"Checkpointing {resolved.checkpointing}:"
        return [f"{head} likewise." if asked.micro_batch == "auto" else f"{head} {_AS_WITH_A_FREE_P}"]
    if resolved.checkpointing == "none":
        return ["Checkpointing none: it fits without computing activations again."]
    if grid.partition_size > grid.devices_per_node:
        return ["Checkpointing full: the less memory a device needs, the smaller is the p that spans nodes."]
    return ["Checkpointing full: without it, it does not fit inside a node."]


def _precision(asked: TrainConfig, resolved: TrainConfig, machines: Machines) -> list[str]:
    if asked.precision == "auto":
        has = "computes in bf16" if machines.bf16 else "has no fast bf16"
        scale = ", so the loss is scaled against underflow" if resolved.precision == "fp16" else ""
        return [f"Precision {resolved.precision}: {machines.device} {has}{scale}."]
    if asked.precision == "bf16" and not machines.bf16:
        return [f"Precision bf16 as asked for, but {machines.device} has no fast bf16: expect it to be slow."]
    return []


def _name(train: TrainConfig) -> str:
    return train.model if isinstance(train.model, str) else f"a model of {_count(_parameters(train))} parameters"


def _parameters(train: TrainConfig) -> int:
    assert train.shape is not None, "a model that cannot be weighed has no reason of this kind"
    return train.shape.parameters


def _limit(machines: Machines) -> str:
    limit, whole = memory_limit_bytes(machines), machines.device_memory_bytes
    return f"{_memory(limit)} ({MARGIN * 100:.0f} % of {_memory(whole)})"


def _enough_nodes(machines: Machines, least: Choice, memory_of: MemoryOf) -> int | None:
    """The fewest nodes for which p = n fits; memory falls with p, so they are found by halving. None: too few."""
    k, more = machines.devices_per_node, range(machines.nodes + 1, MOST_NODES + 1)

    def enough(nodes: int) -> bool:
        return fits(machines, memory_of(nodes * k, least.micro_batch, least.checkpointing))

    fewest = bisect_left(more, True, key=enough)
    return more[fewest] if fewest < len(more) else None


def _memory(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
