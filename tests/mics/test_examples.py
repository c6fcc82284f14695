"""The examples run, in the form in which they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, MICRO_STEPS = 4, 2
# What torchtitan's llama3 imports. The rest of what it declares (datasets, wandb, ...) belongs to its trainer.
TORCHTITAN = ["torchtitan==0.3.0", "spmd_types==0.2.3", "tyro", "typeguard", "docstring_parser", "typing_inspection"]


def code_lines(example):
    """Without the docstring, comments and blank lines."""
    code = (EXAMPLES / example).read_text().split('"""', 2)[2]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code.splitlines())


def test_the_examples_are_short():
    assert code_lines("own_loop.py") <= 30
    assert code_lines("torchtitan_mics.py") <= 40


def test_import_is_light_and_every_name_is_there():
    script = """
import sys, mics
assert "torch" not in sys.modules
assert mics.metrics.__name__ == "mics.metrics"
assert all(callable(getattr(mics, name)) for name in mics.__all__ if name != "metrics")
try:
    mics.aply
except AttributeError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "module 'mics' has no attribute 'aply'\n", ended.stderr


@pytest.mark.distributed
def test_own_loop():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    ended = subprocess.run(
        [*torchrun, str(EXAMPLES / "own_loop.py")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+  loss ([\d.]+)", ended.stdout)]
    assert len(losses) == 10
    assert sum(losses[-3:]) < sum(losses[:3])
    stages = ended.stdout.splitlines()[-1]
    # 4 micro-steps: 2 blocks gathered twice and the root once, all three reduced; p = n, so no hop 2
    counts = {"gather_across": 20, "gather_inside": 20, "hop1_across": 12, "hop1_inside": 12, "hop2": 0}
    assert {stage: int(calls) for stage, calls in re.findall(r"'(\w+)': \((\d+),", stages)} == counts


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory):
    """A folder with torchtitan in it."""
    folder = tmp_path_factory.mktemp("torchtitan")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *TORCHTITAN]
    try:
        installed = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("pip did not get torchtitan within 120 s")
    if installed.returncode:
        pytest.skip(f"pip cannot get torchtitan: {installed.stderr.strip().splitlines()[-1]}")
    return str(folder)


def small_llama(llama3, attention):
    """torchtitan's debug model with 2 layers. Its attention is SDPA: the others need a GPU."""
    config = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def loss_of(model, micro, rank):
    random = torch.Generator().manual_seed(10 * micro + rank)
    tokens, targets = torch.randint(2048, (2, 2, 16), generator=random)
    logits = model(tokens, torch.arange(16).expand(2, 16))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / (RANKS * MICRO_STEPS)


def train_step(folder, examples, p):
    """Weights after one step of torchtitan's llama3, sharded by the example and plain; hop 2 by micro-step."""
    sys.path[:0] = [folder, examples]
    # Experimental expert parallelism, which needs triton; torch for CPUs comes without.
    sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    import torchtitan_mics
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models import llama3
    from torchtitan.models.common import attention

    spec = torchtitan_mics.model_registry("debugmodel")
    settings = {"data_parallel_shard_degree": p, "data_parallel_replicate_degree": RANKS // p}
    parallelism = ParallelismConfig(**settings, spmd_backend="partial_dtensor")
    batches = {"local_batch_size": 2, "global_batch_size": 2 * RANKS * MICRO_STEPS}
    training = TrainingConfig(**batches, mixed_precision_param="float32", disable_cuda_graphs=True)
    model = spec.parallelize_fn(
        small_llama(llama3, attention),
        parallel_dims=ParallelDims.from_config(parallelism, RANKS),
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=FullAC.Config(),
        dump_folder="",
    )
    all_reduces, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (all_reduces.append(1), all_reduce(*args, **kwargs))[1]
    by_micro_step = []
    for micro in range(MICRO_STEPS):
        before = len(all_reduces)
        loss_of(model, micro, dist.get_rank()).backward()
        by_micro_step.append(len(all_reduces) - before)
    dist.all_reduce = all_reduce

    plain = small_llama(llama3, attention)
    for micro in range(MICRO_STEPS):
        for rank in range(RANKS):
            loss_of(plain, micro, rank).backward()
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=1.0).step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return by_micro_step, [(mine.full_tensor().detach(), other.detach()) for mine, other in pairs]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("p", "hop2"), [(4, [0, 0]), (2, [0, 3])])
def test_torchtitan(p, hop2, torchtitan, run_ranks):
    for by_micro_step, weights in run_ranks(
        train_step, ranks=RANKS, deadline_s=120, folder=torchtitan, examples=str(EXAMPLES), p=p
    ):
        assert by_micro_step == hop2
        for mine, plain in weights:
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
