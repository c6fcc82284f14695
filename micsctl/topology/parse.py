"""Reads what the tools on a node print. Pure: text in, facts out; ParseError is all that a reader raises."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SECTION = re.compile(r"^@@ begin (\w+)\n(.*?)\n@@ end (\d+)$", re.S | re.M)
_GPU = re.compile(r"GPU(\d{1,4})")
_LINK = re.compile(r"NV(\d{1,3})|X|SYS|NODE|PHB|PXB|PIX|SOC")
_AFFINITY_COLUMNS = {"CPU Affinity": "cpus", "NUMA Affinity": "numa", "GPU NUMA ID": "gpu_numa"}
_NIC_LEGEND = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)\s*$", re.M)
_FI_PROVIDER = re.compile(r"^\s*provider:\s*(\S+)", re.M)
_FI_DOMAIN = re.compile(r"^\s*domain:\s*(\S+)", re.M)


class ParseError(ValueError):
    """The text is not what it should be; the message quotes it."""


@dataclass(frozen=True)
class Section:
    """What one command of the probe printed (stdout and stderr together), and its exit code."""

    text: str
    exit_code: int


@dataclass(frozen=True)
class LinkMatrix:
    """`nvidia-smi topo -m`. Index i is GPU i.

    nvlinks      [i][j] = bonded NVLinks between GPUs i and j; 0 = they talk over PCIe
    numa_nodes   of each GPU; None = unknown (an old driver without the column, or N/A)
    nics         names of the network cards in the table, by their legend where it has one
    """

    nvlinks: tuple[tuple[int, ...], ...]
    numa_nodes: tuple[int | None, ...]
    nics: tuple[str, ...]

    def peers(self, gpu: int) -> int:
        """GPUs that this one reaches over NVLink."""
        return sum(links > 0 for links in self.nvlinks[gpu])


def sections(text: str) -> dict[str, Section]:
    """The probe's output by section name."""
    found = {name: Section(body.strip("\n"), int(code)) for name, body, code in _SECTION.findall(_plain(text))}
    if not found:
        raise ParseError(f"the probe printed no section: {_quoted(text)}")
    return found


def csv_table(text: str, columns: Sequence[str] | None = None) -> list[dict[str, str | None]]:
    """Rows of `nvidia-smi --query-gpu=... --format=csv`, with `nounits` or not, by column name without its unit.

    columns   their names where the text has no header (`noheader`)

    A cell that says it does not know ([N/A], [Unknown Error], ...) is None. An error message in place of the table
    raises ParseError with the message as it stands.
    """
    lines = [line for line in _plain(text).splitlines() if line.strip()]
    if not lines:
        raise ParseError("nvidia-smi printed nothing")
    if columns is None:
        header, *lines = lines
        columns = [cell.strip().split(" [")[0] for cell in header.split(",")]
        if not all(re.fullmatch(r"[A-Za-z]\w*(\.\w+)*", name) for name in columns):
            raise ParseError("\n".join([header, *lines]).strip())
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if any(len(row) != len(columns) for row in rows):
        raise ParseError("\n".join(lines).strip())
    return [dict(zip(columns, map(_known, row), strict=True)) for row in rows]


def link_matrix(text: str) -> LinkMatrix:
    """`nvidia-smi topo -m` of any driver: tabs or blanks, colours, cards among the GPUs, NUMA columns or none.

    Refused with ParseError: an error message, a table that is cut short, one that is not symmetric, and the table of
    another command (`topo -p2p` has status words in place of links).
    """
    plain = _plain(text)
    lines = [line.split() for line in _joined_headings(plain).splitlines() if line.strip()]
    start = next((i for i, words in enumerate(lines) if _is_header(words)), None)
    if start is None:
        raise ParseError(f"no table of links: {_quoted(plain)}")
    header, body = lines[start], lines[start + 1 :]
    endpoints = [word for word in header if word not in _AFFINITY_COLUMNS.values()]
    affinity = header[len(endpoints) :]
    gpus = [word for word in endpoints if _GPU.fullmatch(word)]
    if endpoints[: len(gpus)] != [f"GPU{i}" for i in range(len(gpus))] or set(affinity) - {*_AFFINITY_COLUMNS.values()}:
        raise ParseError(f"unexpected columns: {' '.join(header)}")
    rows = body[: len(endpoints)]
    if [row[0] for row in rows] != endpoints:
        raise ParseError(f"the table is cut: {len(endpoints)} columns, rows {', '.join(row[0] for row in rows)}")
    links = [[_links(cell) for cell in row[1 : len(endpoints) + 1]] for row in rows]
    if any(len(row) != len(endpoints) for row in links):
        raise ParseError("the table is cut: a row has too few cells")
    if any(links[i][j] != links[j][i] for i in range(len(links)) for j in range(i)):
        raise ParseError("the table is not symmetric")
    if any((cell == "X") != (i == j) for i, row in enumerate(rows) for j, cell in enumerate(row[1 : len(rows) + 1])):
        raise ParseError("the table's diagonal is not X")
    legend = dict(_NIC_LEGEND.findall(plain))
    return LinkMatrix(
        nvlinks=tuple(tuple(row[: len(gpus)]) for row in links[: len(gpus)]),
        numa_nodes=tuple(_numa(row[len(endpoints) + 1 :], affinity) for row in rows[: len(gpus)]),
        nics=tuple(legend.get(name, name) for name in endpoints[len(gpus) :]),
    )


def fi_info(text: str) -> tuple[str, ...]:
    """EFA devices that libfabric sees (`fi_info -p efa`); () for its "no data" answer, -61.

    One device is listed once per endpoint type (`rdmap0s6-rdm`, `rdmap0s6-dgrm`), so the devices are the domains
    without that ending.
    """
    plain = _plain(text)
    providers = _FI_PROVIDER.findall(plain)
    domains = _FI_DOMAIN.findall(plain)
    if not providers and not re.search(r"fi_getinfo:\s*-61\b", plain):
        raise ParseError(f"not an answer of fi_info: {_quoted(plain)}")
    if len(providers) != len(domains):
        raise ParseError(f"fi_info was cut: {len(providers)} providers, {len(domains)} domains")
    efa = (domain for provider, domain in zip(providers, domains, strict=True) if provider == "efa")
    return tuple(dict.fromkeys(re.sub(r"-(rdm|dgrm)$", "", domain) for domain in efa))


def rdma_devices(text: str) -> tuple[str, ...]:
    """Devices that the kernel has: `ibv_devices`, or bare names from /sys/class/infiniband. Messages are left out."""
    rows = [line.split() for line in _plain(text).splitlines()]
    device = re.compile(r"[a-z][a-z0-9_]*\d[a-z0-9_]*")
    guid = re.compile(r"[0-9a-f]{16}")
    return tuple(
        row[0]
        for row in rows
        if row and device.fullmatch(row[0]) and (len(row) == 1 or (len(row) == 2 and guid.fullmatch(row[1])))
    )


def is_efa(device: str) -> bool:
    """EFA devices are `rdmap<bus>s<slot>` after udev has renamed them and `efa_<n>` before; others have other names."""
    return device.startswith(("rdmap", "efa_"))


def interface_of(text: str, address: str) -> str:
    """The interface that carries `address`, from `ip -o addr`; "lo" for any 127.x.y.z, which need not be listed."""
    if address.startswith("127."):
        return "lo"
    for line in _plain(text).splitlines():
        words = line.split()
        if len(words) > 3 and words[2] in ("inet", "inet6") and words[3].split("/")[0] == address:
            return words[1].rstrip(":").split("@")[0]
    raise ParseError(f"no interface carries {address}: {_quoted(text)}")


def memory_bytes(text: str) -> int:
    """MemTotal of /proc/meminfo."""
    if match := re.search(r"^MemTotal:\s+(\d{1,15}) kB$", _plain(text), re.M | re.A):
        return int(match[1]) << 10
    raise ParseError(f"no MemTotal: {_quoted(text)}")


def count(text: str) -> int:
    """A bare positive number, such as nproc's."""
    if match := re.fullmatch(r"\s*([1-9]\d{0,8})\s*", _plain(text), re.A):
        return int(match[1])
    raise ParseError(f"not a number: {_quoted(text)}")


def seconds(text: str) -> float:
    """`date +%s.%N`."""
    if match := re.fullmatch(r"\s*(\d{1,12}(\.\d{1,12})?)\s*", text, re.A):
        return float(match[1])
    raise ParseError(f"not a time: {_quoted(text)}")


def python_versions(text: str) -> dict[str, str]:
    """The probe's JSON of versions, in the last line (Python may print warnings before it)."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):
        raise ParseError(f"no versions: {_quoted(text)}") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ParseError(f"no versions: {_quoted(text)}")
    return found


def tool_versions(of: Mapping[str, Section]) -> dict[str, str]:
    """kernel, libfabric, efa: each where its section has one."""
    patterns = {
        "kernel": ("kernel", r"(\S+)"),
        "libfabric": ("fi_version", r"libfabric: (\S+)"),
        "efa": ("efa_version", r"EFA installer version: (\S+)"),
    }
    found = {
        name: re.search(pattern, of[section].text)
        for name, (section, pattern) in patterns.items()
        if section in of and of[section].exit_code == 0
    }
    return {name: match[1] for name, match in found.items() if match}


def _plain(text: str) -> str:
    return _ANSI.sub("", text).replace("\r", "")


def _joined_headings(text: str) -> str:
    """Headings of two or three words as one word each."""
    for heading, word in _AFFINITY_COLUMNS.items():
        text = re.sub(heading.replace(" ", r"[ \t]+"), f" {word} ", text)
    return text


def _is_header(words: Sequence[str]) -> bool:
    return words[0] == "GPU0" and (len(words) == 1 or not _LINK.fullmatch(words[1]))


def _links(cell: str) -> int:
    match = _LINK.fullmatch(cell)
    if not match:
        raise ParseError(f"{cell!r} is no link; is this the table of `nvidia-smi topo -m`?")
    return int(match[1] or 0)


def _numa(cells: Sequence[str], affinity: Sequence[str]) -> int | None:
    if len(cells) != len(affinity):
        return None
    value = dict(zip(affinity, cells, strict=True)).get("numa", "")
    return int(value) if re.fullmatch(r"\d{1,4}", value, re.A) else None


def _known(cell: str) -> str | None:
    return None if not cell or (cell.startswith("[") and cell.endswith("]")) else cell


def _quoted(text: str, characters: int = 300) -> str:
    stripped = text.strip()
    return stripped[:characters] + (" ..." if len(stripped) > characters else "") if stripped else "(nothing)"
