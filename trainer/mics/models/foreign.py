"""Models that others wrote: made without memory, and looked into."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mics.errors import RunRefusedError

SPREAD = 0.02  # of the initial matrices


@contextmanager
def matrices_on_meta(seed: int) -> Iterator[None]:
    """Modules made in here have their matrices on the meta device, one by one as they are made.

    Buffers and vectors (norms, biases) are real and keep the values that their constructor gives them: nobody else
    knows them. They are few. Random ones depend on the seed alone.
    """
    hook = register_module_parameter_registration_hook(_matrix_to_meta)  # type: ignore[arg-type]  # it may answer
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        hook.remove()


def _matrix_to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None or parameter.dim() < 2 or parameter.is_meta else _to_meta(parameter)


def _to_meta(parameter: nn.Parameter) -> nn.Parameter:
    moved = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    moved.__dict__.update(parameter.__dict__)  # marks that its maker has put there
    return moved


def take_vectors(model: nn.Module) -> dict[str, Tensor]:
    """Move what is left of the parameters to the meta device, tied ones together; returns their values by name."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.is_meta}
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                setattr(module, key, moved.setdefault(parameter, _to_meta(parameter)))
    return values


def fill(values: Mapping[str, Tensor], spread: float, name: str, full: Tensor, generator: torch.Generator) -> None:
    """The initial value of one parameter: the one of its constructor, else normal; biases 0 and norms 1."""
    if name in values:
        full.copy_(values[name])
    elif name.endswith("bias"):
        full.zero_()
    elif full.dim() < 2:
        full.fill_(1.0)
    else:
        full.normal_(0.0, spread, generator=generator)


def blocks_of(model: nn.Module, name: str) -> tuple[nn.Module, ...]:
    """The model's own `blocks`, else the largest list of modules of one class. Raises RunRefusedError."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    uniform = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    named = getattr(model, "blocks", None) or max(uniform, key=_size, default=())
    found = tuple(named) if isinstance(named, Iterable) else ()
    parts = list(model.modules())  # no set: what stands in for a block may have no hash
    if not found or any(block not in parts for block in found):
        raise RunRefusedError(
            f"{name}: no blocks found that could be gathered one at a time; give the model an attribute blocks, a "
            "list of its modules"
        )
    return found


def check(model: nn.Module, blocks: Sequence[nn.Module], name: str) -> None:
    """Raises RunRefusedError where the model cannot be sharded block by block, or nothing of it trains."""
    inside = [set(block.modules()) for block in blocks]
    if model in blocks or any(sum(block in modules for modules in inside) > 1 for block in blocks):
        raise RunRefusedError(f"{name}: one of its blocks is there twice, or is part of another, or is the whole model")
    home: dict[nn.Parameter, int] = {}
    for place, modules in enumerate([*inside, set(model.modules()).difference(*inside)]):
        if any(home.setdefault(p, place) != place for module in modules for p in module.parameters(recurse=False)):
            raise RunRefusedError(
                f"{name}: a block shares a parameter with what is outside of it; that cannot be sharded"
            )
    for key, parameter in model.named_parameters():
        if not (parameter.is_floating_point() and parameter.dim() and parameter.numel()):
            found = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            raise RunRefusedError(f"{name}: its parameter {key} is {found}, not a vector or more of floats")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunRefusedError(f"{name}: it has no parameter that trains")


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def identity(model: nn.Module) -> dict[str, object]:
    """What a checkpoint must agree on: the class, the size, and a digest of all names and shapes."""
    shapes = sorted(f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters())
    digest = hashlib.blake2b("\n".join(shapes).encode(), digest_size=8).hexdigest()
    return {"class": type(model).__name__, "parameters": _size(model), "names_and_shapes": digest}


def flops_per_token(model: nn.Module) -> float:
    """Of the forward pass: 2 for each element of a matrix that is no mere look-up. Attention scores are not counted."""
    users = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    matrices = {p for module in users for p in module.parameters(recurse=False) if p.dim() >= 2}
    return 2.0 * sum(matrix.numel() for matrix in matrices)
