"""What to ask a node: one shell command whose output is cut into named sections. It succeeds whatever is missing."""

from __future__ import annotations

import shlex

GPU_COLUMNS = ("index", "name", "memory.total", "driver_version", "mig.mode.current")

# from the packages' metadata, because importing torch takes seconds
_VERSIONS = """
import importlib.metadata as metadata, json, platform, re
versions = {"python": platform.python_version()}
try:
    versions["torch"] = metadata.version("torch")
    needs = [re.match(r"[\\w.-]+", need)[0] for need in metadata.requires("torch") or ()]
    versions |= {"nccl": metadata.version(name) for name in needs if name.startswith("nvidia-nccl")}
except metadata.PackageNotFoundError:
    pass
print(json.dumps(versions))
"""

# name of a section -> shell text; `parse.py` has a reader for each
SECTIONS = {
    "hostname": "uname -n",
    "kernel": "uname -r",
    "cpus": "nproc",
    "memory": "cat /proc/meminfo",
    "addresses": "ip -o addr",
    "gpus": f"nvidia-smi --query-gpu={','.join(GPU_COLUMNS)} --format=csv,nounits",
    "links": "nvidia-smi topo -m",
    "fi_info": "fi_info -p efa",
    "fi_version": "fi_info --version",
    "rdma": "ibv_devices || ls -1 /sys/class/infiniband",
    "efa_version": "head -n 1 /opt/amazon/efa_installed_packages",
    "versions": f"~/.micsctl/python -c {shlex.quote(_VERSIONS)}",
}

# `timeout`, because a driver in trouble can hang a query for minutes; a hung query must not hide the other answers
_PROLOGUE = """export LC_ALL=C PATH="$PATH:/opt/amazon/efa/bin:/usr/sbin:/sbin"
section() {
    printf '\\n@@ begin %s\\n' "$1"
    timeout -k 2 20 bash --norc -c "$2" </dev/null 2>&1
    printf '\\n@@ end %s\\n' "$?"
}
"""

COMMAND = _PROLOGUE + "".join(f"section {name} {shlex.quote(text)}\n" for name, text in SECTIONS.items()) + "true\n"
COMMAND_SECONDS = 120

CLOCK = "date +%s.%N"
