"""Train on 8 CPU ranks while a random rank is killed again and again; compare the loss curve with an undisturbed run.

    python tests/mics/soak.py --minutes 20 --kill-every 120

Every kill is SIGKILL of one rank at a random moment (in a save, too); the whole job is then started again on the same
run.json and must go on from its newest whole checkpoint by itself. At the end the same number of steps is trained
without a kill. Exit code 0 where the two loss curves are the same.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mics.config import CheckpointConfig, RunConfig, TrainConfig
from mics.shapes import ModelShape

LAUNCHER = Path(__file__).with_name("trainer_launcher.py")
NODES, DEVICES = 4, 2
TOLERANCE = 1e-6  # nats; the same n, p and seed, so only the order of sums inside gloo could differ
START_LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Result:
    kills: int
    steps: int
    largest_difference: float
    saves_interrupted: int  # kills that left a save half done

    @property
    def same_curve(self) -> bool:
        return self.largest_difference <= TOLERANCE


def run_of(folder: Path, steps: int) -> RunConfig:
    train = TrainConfig(
        model=ModelShape(hidden=36, layers=3, heads=3, positions=32),
        partition=4,
        hierarchical=True,
        micro_batch=1,
        accumulation=2,
        sequence=32,
        steps=steps,
        schedule="wsd",  # the learning rate of a step must not depend on how many there will be
        decay=1,
        precision="fp32",
        checkpointing="full",
        reshard_after_forward=True,
        checkpoint=CheckpointConfig(str(folder / "checkpoints"), every=10, keep=2),
    )
    return RunConfig("soak", train, NODES, DEVICES)


def start(folder: Path, deadline_seconds: float) -> subprocess.Popen[str]:
    environments = json.dumps([{}] * NODES)
    numbers = [str(number) for number in (NODES, DEVICES, round(deadline_seconds))]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, str(LAUNCHER), "mics.train", str(folder / "run.json"), *numbers, environments],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records}


def whole_steps(folder: Path) -> list[int]:
    paths = (folder / "checkpoints" / "soak").glob("step-*/complete.json")
    return sorted(json.loads(path.read_text())["progress"]["step"] for path in paths)


def file_number(folder: Path) -> int:
    """The metrics file's inode: a job that starts replaces the file."""
    path = folder / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else 0


def started(folder: Path, deadline_seconds: float) -> subprocess.Popen[str]:
    """A job that has made a step of its own; one that ends before has failed."""
    before, done = file_number(folder), max(whole_steps(folder), default=0)
    process, deadline = start(folder, deadline_seconds), time.monotonic() + START_LIMIT_SECONDS
    while file_number(folder) == before or max(losses(folder), default=0) <= done:
        if process.poll() is not None or time.monotonic() > deadline:
            end(process)
            raise SystemExit(f"the job made no step after {done}:\n{(folder / 'output.txt').read_text()[-4000:]}")
        time.sleep(0.2)
    return process


def unfinished(folder: Path) -> bool:
    """Whether a save has no completion mark."""
    saves = (folder / "checkpoints" / "soak").glob("step-*")
    return not all((save / "complete.json").exists() for save in saves)


def disturbed(folder: Path, *, seconds: float, kill_every_seconds: float, seed: int) -> tuple[int, int]:
    """Kill ranks until the time is over, then let the run stop by SIGTERM. Returns kills and interrupted saves."""
    (folder / "run.json").write_text(run_of(folder, steps=1_000_000).to_json())
    dice, kills, interrupted, over = random.Random(seed), 0, 0, time.monotonic() + seconds
    while True:
        process = started(folder, seconds + START_LIMIT_SECONDS)
        try:
            life = min(dice.uniform(0.5, 1.0) * kill_every_seconds, max(1.0, over - time.monotonic()))
            time.sleep(life)
            if time.monotonic() >= over:
                process.terminate()
                process.wait(START_LIMIT_SECONDS)
                return kills, interrupted
            os.kill(dice.choice(ranks_of(process)), signal.SIGKILL)
            process.wait(START_LIMIT_SECONDS)
            kills += 1
            interrupted += unfinished(folder)
            print(f"kill {kills}: at step {max(losses(folder))}, newest whole checkpoint {whole_steps(folder)[-1:]}")
        finally:
            end(process)


def undisturbed(folder: Path, steps: int, limit_seconds: float) -> None:
    (folder / "run.json").write_text(run_of(folder, steps=1_000_000).to_json())
    process = started(folder, limit_seconds)
    try:
        over = time.monotonic() + limit_seconds
        while max(losses(folder)) < steps and process.poll() is None and time.monotonic() < over:
            time.sleep(0.2)
    finally:
        end(process)


def soak(folder: Path, *, seconds: float, kill_every_seconds: float, seed: int = 0) -> Result:
    for name in ("killed", "calm"):
        (folder / name).mkdir()
    kills, interrupted = disturbed(folder / "killed", seconds=seconds, kill_every_seconds=kill_every_seconds, seed=seed)
    got = losses(folder / "killed")
    undisturbed(folder / "calm", max(got), limit_seconds=2 * seconds + START_LIMIT_SECONDS)
    expected = losses(folder / "calm")
    if sorted(got) != list(range(1, max(got) + 1)):
        raise SystemExit("the killed run's metrics.jsonl lacks steps, or has some twice")
    differences = [abs(got[step] - expected[step]) for step in got]
    return Result(kills, max(got), max(differences), interrupted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="how long ranks are killed (default 20)")
    parser.add_argument("--kill-every", type=float, default=120, metavar="SECONDS", help="at most (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the ranks (default 0)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mics-soak-") as folder:
        result = soak(Path(folder), seconds=asked.minutes * 60, kill_every_seconds=asked.kill_every, seed=asked.seed)
    print(
        f"{result.kills} kills ({result.saves_interrupted} in a save), {result.steps} steps; "
        f"losses differ by {result.largest_difference:.1e} at most"
    )
    return 0 if result.same_curve and result.kills else 1


if __name__ == "__main__":
    sys.exit(main())
