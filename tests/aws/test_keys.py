from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from micsctl.aws.keys import ensure_key_file, fingerprint
from micsctl.errors import UsageError


def test_a_key_is_made_once_and_ssh_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "demo" / "id_ed25519"
    public = ensure_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert ensure_key_file(path) == public
    answer = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True, timeout=20)
    assert answer.stdout.split()[:2] == public.split()
    listed = subprocess.run(["ssh-keygen", "-l", "-f", path], capture_output=True, text=True, check=True, timeout=20)
    assert listed.stdout.split()[1] == fingerprint(public)


def test_a_damaged_key_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "id_ed25519"
    path.write_text("not a key")
    with pytest.raises(UsageError, match="not a readable SSH key"):
        ensure_key_file(path)
