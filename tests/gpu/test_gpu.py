"""One or more GPUs, one command: `make gpu`. Leaves gpu-report.md. Skipped where there is no GPU."""

import pytest
import torch
from mics.config import CheckpointConfig, ProfileConfig, TrainConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(1800),
]
NO_CHECKPOINTS = CheckpointConfig(every=0)


def settings(**values):
    standard = {"sequence": 512, "accumulation": 2, "steps": 12, "lr": 3e-4, "checkpoint": NO_CHECKPOINTS}
    return TrainConfig(**{**standard, **values})


def test_bf16_trains_like_fp32(check, report, tmp_path):
    machines = check.machines_here()
    same = {"model": "gpt-17m", "micro_batch": 8, "steps": 40, "strategy": "zero3"}
    fp32 = check.train(tmp_path / "fp32", machines, settings(precision="fp32", **same))
    bf16 = check.train(tmp_path / "bf16", machines, settings(precision="bf16", **same))
    apart = max(abs(a - b) / a for a, b in zip(fp32.losses, bf16.losses, strict=True))
    report.append(("bf16 against fp32, loss of 40 steps", "within 2 %", f"{apart:.2%}"))
    assert fp32.losses[-1] < 0.8 * fp32.losses[0]
    assert apart < 0.02


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_compiled_run_is_recorded_saved_and_goes_on(precision, check, report, tmp_path):
    machines = check.machines_here()
    window = ProfileConfig(first_step=3, steps=1, memory=True)
    same = {"model": "gpt-17m", "micro_batch": 8, "steps": 20, "strategy": "zero3", "checkpointing": "selective"}
    first, second = check.train_in_two_halves(
        tmp_path, machines, settings(precision=precision, compile="inductor", profile=window, **same)
    )
    assert [record["step"] for record in second.records] == list(range(11, 21))
    assert second.losses[-1] < second.losses[0] < first.losses[0]
    recorded = {path.name for path in (tmp_path / "first" / "profile").iterdir()}
    assert recorded == {"rank-0.json.gz", "memory-rank-0.pickle"}
    report.append((f"{precision}, compiled: goes on from its checkpoint", "loss goes on falling", "yes"))


@pytest.mark.parametrize("model", ["bert-1.5b", "llama-1b-like"])
def test_speed_and_memory(model, check, report, tmp_path):
    one = check.replace(check.machines_here(), devices_per_node=1)
    outcome = check.train(tmp_path / "run", one, settings(model=model))
    mfu, tflops = outcome.median("mfu"), outcome.median("tflops_per_device")
    predicted, measured = outcome.predicted_bytes, outcome.memory_bytes
    what = f"{model}, micro-batch {outcome.plan.train.micro_batch}, checkpointing {outcome.plan.train.checkpointing}"
    report.append((f"{what}: MFU on one GPU", "above 30 %", f"{mfu:.1%} ({tflops:.0f} TFLOPS)"))
    report.append((f"{what}: allocated memory", f"{predicted / 1e9:.1f} GB", f"{measured / 1e9:.1f} GB"))
    assert mfu > 0.3
    assert abs(measured / predicted - 1) < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 4 or torch.cuda.device_count() % 2, reason="needs 4 GPUs")
def test_hierarchical_against_flat(check, report, tmp_path):
    machines = check.as_two_nodes(check.machines_here())
    same = {"model": "gpt2-1.5b", "micro_batch": 4, "partition": machines.world_size, "precision": "bf16"}
    flat = check.train(tmp_path / "flat", machines, settings(strategy="mics-flat", **same))
    two_stages = check.train(tmp_path / "two", machines, settings(strategy="mics", hierarchical=True, **same))
    apart = max(abs(a - b) / a for a, b in zip(flat.losses, two_stages.losses, strict=True))
    ratio = flat.median("step_seconds") / two_stages.median("step_seconds")
    report.append(("hierarchical against flat, loss of 12 steps", "within 1 %", f"{apart:.2%}"))
    report.append(("hierarchical against flat, one machine as two nodes", "no claim", f"{ratio:.2f}x"))
    assert apart < 0.01
