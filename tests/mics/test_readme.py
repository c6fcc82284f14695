"""The README's commands for the trainer, as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return [shlex.split(line, comments=True) for line in "\n".join(blocks).splitlines()]


@pytest.mark.distributed
def test_they_run(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(200):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"document {number}\n" * 20)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    tools = Path(sys.executable).parent
    typed = [words for words in commands() if words and words[0] in ("python", "torchrun")]
    assert len(typed) >= 3
    for words in typed:
        ended = subprocess.run(
            [tools / words[0], *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        assert ended.returncode == 0, (words, ended.stderr)
        assert ended.stdout, words
    assert (tmp_path / "tokens" / "validation.bin").stat().st_size > 0
