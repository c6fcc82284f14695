from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micsctl.topology import parse
from micsctl.topology.parse import ParseError

from . import samples

# nvidia-smi topo -m


def test_a_recent_table() -> None:
    matrix = parse.link_matrix(samples.FOUR_NV12)
    assert matrix.nvlinks == tuple(tuple(0 if i == j else 12 for j in range(4)) for i in range(4))
    assert matrix.numa_nodes == (0, 0, 1, 1)
    assert matrix.nics == ()
    assert [matrix.peers(i) for i in range(4)] == [3, 3, 3, 3]


def test_a_table_copied_from_a_terminal() -> None:
    matrix = parse.link_matrix("GPU Topology:\n" + samples.BRIDGE)
    assert matrix.nvlinks == ((0, 4, 0), (4, 0, 0), (0, 0, 0))
    assert [matrix.peers(i) for i in range(3)] == [1, 1, 0]
    assert matrix.numa_nodes == (0, 0, None)


def test_cards_are_no_gpus() -> None:
    matrix = parse.link_matrix(samples.OLD_WITH_NICS)
    assert matrix.nvlinks == ((0, 1), (1, 0))
    assert matrix.numa_nodes == (None, None)
    assert matrix.nics == ("mlx5_0", "mlx5_2")
    matrix = parse.link_matrix(samples.NIC_LEGEND)
    assert matrix.nvlinks == ((0, 0), (0, 0))
    assert matrix.numa_nodes == (1, 1)
    assert matrix.nics == ("rocep49s0",)


def test_mig_and_colours() -> None:
    matrix = parse.link_matrix(samples.MIG)
    assert matrix.nvlinks == ((0,),)
    assert matrix.numa_nodes == (0,)


def test_windows_line_ends() -> None:
    assert parse.link_matrix(samples.FOUR_NV12.replace("\n", "\r\n")) == parse.link_matrix(samples.FOUR_NV12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (samples.P2P, "'OK' is no link"),
        ("No devices were found\n", "No devices were found"),
        ("", "nothing"),
        (samples.FOUR_NV12.split("GPU3\tNV12")[0], "cut"),
        (samples.FOUR_NV12.split("\t X \t24-47,72-95\t1\t\tN/A\n\nLegend")[0], "cut"),
        (samples.OLD_WITH_NICS.split("mlx5_2\tSYS")[0], "cut"),
        (samples.FOUR_NV12.replace("GPU0\t X \tNV12", "GPU0\t X \tNV6"), "symmetric"),
        (samples.BRIDGE.replace(" X ", "SYS"), "diagonal"),
        (samples.FOUR_NV12.replace("GPU2\tGPU3", "GPU3\tGPU2"), "columns"),
    ],
)
def test_what_is_no_table_of_links_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        parse.link_matrix(text)


LINKS = st.sampled_from(["NV1", "NV18", "SYS", "NODE", "PHB", "PXB", "PIX", "SOC"])


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[list[str]], int, bool]:
    """A printed table, its cells, how many of its endpoints are GPUs, and whether it has NUMA columns."""
    gpus, nics = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    names = [f"GPU{i}" for i in range(gpus)] + [f"mlx5_{i}" for i in range(nics)]
    cells = [["X"] * len(names) for _ in names]
    for i in range(len(names)):
        for j in range(i):
            cells[i][j] = cells[j][i] = draw(LINKS)
    gap, numa = draw(st.sampled_from(["\t", "    "])), draw(st.booleans())
    heads = ["CPU Affinity", "NUMA Affinity"] if numa else ["CPU Affinity"]
    lines = [gap.join(["", *names, *heads])]
    for i, name in enumerate(names):
        tail = (["0-23", str(i % 2)] if numa else ["0-23"]) if i < gpus else [""] * len(heads)
        lines.append(gap.join([name, *cells[i], *tail]))
    return "\n".join(lines) + samples.LEGEND, cells, gpus, numa


@given(tables())
def test_every_table_is_read_back(table: tuple[str, list[list[str]], int, bool]) -> None:
    text, cells, gpus, numa = table
    matrix = parse.link_matrix(text)
    expected = [[int(c[2:]) if c.startswith("NV") else 0 for c in row[:gpus]] for row in cells[:gpus]]
    assert [list(row) for row in matrix.nvlinks] == expected
    assert matrix.numa_nodes == tuple(i % 2 if numa else None for i in range(gpus))
    assert len(matrix.nics) == len(cells) - gpus


@given(tables(), st.data())
def test_no_table_without_one_of_its_rows_is_read(
    table: tuple[str, list[list[str]], int, bool], data: st.DataObject
) -> None:
    text, cells, *_ = table
    lines = text.splitlines()
    del lines[data.draw(st.integers(1, len(cells)))]
    with pytest.raises(ParseError):
        parse.link_matrix("\n".join(lines))


# nvidia-smi --query-gpu


def test_csv() -> None:
    rows = parse.csv_table(samples.GPU_CSV)
    assert len(rows) == 4
    assert rows[3] == {
        "index": "3",
        "name": "NVIDIA A100-SXM4-40GB",
        "memory.total": "40960",
        "driver_version": "550.54.15",
        "mig.mode.current": "Disabled",
    }


def test_unknown_cells_and_a_missing_last_newline() -> None:
    text = "name, fan.speed [%], power.draw [W]\nTesla P100, [N/A], [Unknown Error]"
    assert parse.csv_table(text) == [{"name": "Tesla P100", "fan.speed": None, "power.draw": None}]
    assert parse.csv_table("[Unknown Error], 7", ["power.draw", "index"]) == [{"power.draw": None, "index": "7"}]


@pytest.mark.parametrize(
    "message",
    [
        "No devices were found",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173",
        "Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        'Field "mig.mode" is not a valid field to query.',
    ],
)
def test_an_error_is_reported_as_it_stands(message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse.csv_table(message + "\n")
    assert str(caught.value) == message


# EFA


def test_fi_info_counts_devices_not_endpoints() -> None:
    assert parse.fi_info(samples.FI_INFO) == ("rdmap16s27", "rdmap32s27")
    assert parse.fi_info(samples.FI_INFO.replace("provider: efa", "provider: tcp", 1)) == ("rdmap16s27", "rdmap32s27")
    assert parse.fi_info("fi_getinfo: -61\n") == ()
    assert parse.fi_info("fi_getinfo: -61 (No data available)\n") == ()


@pytest.mark.parametrize("text", ["", "bash: fi_info: command not found", samples.FI_INFO.rsplit("    domain", 1)[0]])
def test_what_is_no_fi_info_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse.fi_info(text)


def test_rdma_devices() -> None:
    assert parse.rdma_devices(samples.IBV_DEVICES) == ("rdmap16s27", "mlx5_0")
    assert parse.rdma_devices("bash: line 1: ibv_devices: command not found\nefa_0\nefa_1\n") == ("efa_0", "efa_1")
    assert parse.rdma_devices("ls: cannot access '/sys/class/infiniband': No such file or directory") == ()
    assert [parse.is_efa(name) for name in ("rdmap16s27", "efa_0", "mlx5_0", "rocep49s0")] == [True, True, False, False]


# the rest


def test_interface() -> None:
    assert parse.interface_of(samples.IP_ADDR, "10.77.0.11") == "ens32"
    assert parse.interface_of(samples.IP_ADDR, "10.77.0.1") == "eth0"
    assert parse.interface_of("", "127.77.3.4") == "lo"
    with pytest.raises(ParseError, match=r"10\.77\.0\.12"):
        parse.interface_of(samples.IP_ADDR, "10.77.0.12")


def test_numbers() -> None:
    assert parse.memory_bytes(samples.MEMINFO) == 1176298496 * 1024
    assert parse.count(" 96\n") == 96
    assert parse.seconds("1721000000.250000000\n") == 1721000000.25
    for reader, text in ((parse.memory_bytes, "MemFree: 1 kB"), (parse.count, "0"), (parse.seconds, "now")):
        with pytest.raises(ParseError):
            reader(text)


def test_versions() -> None:
    noisy = "<frozen runpy>: RuntimeWarning: x\n" + samples.VERSIONS
    assert parse.python_versions(noisy) == {"python": "3.11.9", "torch": "2.13.0+cu130", "nccl": "2.28.3"}
    assert parse.tool_versions(parse.sections(samples.probe_output())) == {
        "kernel": "6.8.0-1024-aws",
        "libfabric": "1.22.0amzn1.0",
        "efa": "1.34.0",
    }
    without = samples.probe_output(fi_version=("bash: fi_info: command not found", 127), efa_version=None)
    assert parse.tool_versions(parse.sections(without)) == {"kernel": "6.8.0-1024-aws"}


def test_sections() -> None:
    found = parse.sections("welcome\r\n\n@@ begin a\none\ntwo\n\n@@ end 0\n\n@@ begin b\n\n@@ end 127\n@@ begin c\ncut")
    assert {name: (s.text, s.exit_code) for name, s in found.items()} == {"a": ("one\ntwo", 0), "b": ("", 127)}


READERS = (
    parse.sections,
    parse.csv_table,
    parse.link_matrix,
    parse.fi_info,
    parse.rdma_devices,
    parse.memory_bytes,
    parse.count,
    parse.seconds,
    parse.python_versions,
)
TABLE_WORDS = [
    "GPU0",
    "GPU1",
    "NIC0",
    "mlx5_0",
    "CPU Affinity",
    "NUMA Affinity",
    "GPU NUMA ID",
    "X",
    "NV4",
    "SYS",
    "OK",
]
OTHER_WORDS = [
    "provider:",
    "domain:",
    "efa",
    "fi_getinfo: -61",
    "index,",
    "[N/A]",
    "MemTotal:",
    "kB",
    "{",
    "[",
    "0-3",
    "0",
]
WORDS = [*TABLE_WORDS, *OTHER_WORDS, "N/A", "@@ begin a", "@@ end 0", "٣", "\t", "\n", "\x1b[4m"]
FRAGMENTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(WORDS)), max_size=40)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@given(st.one_of(st.text(), FRAGMENTS.map(" ".join), FRAGMENTS.map("".join)))
def test_a_reader_raises_nothing_but_its_own_error(reader, text: str) -> None:
    with suppress(ParseError):
        reader(text)


@given(st.text(), st.ip_addresses(v=4).map(str))
def test_interface_raises_nothing_but_its_own_error(text: str, address: str) -> None:
    with suppress(ParseError):
        parse.interface_of(text, address)


@given(st.binary(max_size=400))
def test_cut_and_garbled_tables(noise: bytes) -> None:
    text = samples.NIC_LEGEND
    middle = noise.decode("utf-8", "replace")
    for at in range(0, len(text), 37):
        with suppress(ParseError):
            parse.link_matrix(text[:at] + middle + text[at:])


# real samples, where they are at hand

SAMPLES = os.environ.get("MICSCTL_SAMPLES")
real = pytest.mark.skipif(not SAMPLES, reason="MICSCTL_SAMPLES names no folder of real samples")


def sample(name: str) -> str:
    assert SAMPLES
    source, text = (Path(SAMPLES) / name).read_bytes().decode().split("\n", 1)
    assert source.startswith("# source:")
    return text


@real
@pytest.mark.parametrize(
    ("name", "peers", "links", "numa", "nics"),
    [
        ("5gpu_phb_indented_header", [0] * 5, 0, (0,) * 5, ()),
        ("a100_4gpu_roce_nic_trailing_tabs", [3] * 4, 36, (1,) * 4, ("rocep49s0",)),
        ("a6000_3gpu_bridge_pair", [1, 1, 0], 4, (0, 0, 0), ()),
        ("dgx1_v100_4mlx5_tab_oldheader", [4] * 8, 6, (None,) * 8, ("mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3")),
        ("dual_gpu_nv2_numa_na", [1, 1], 2, (None, None), ()),
        ("h100_mig_ansi", [0], 0, (0,), ()),
        ("h100_nv18_8gpu", [7] * 8, 126, (0,) * 4 + (1,) * 4, ()),
        ("h100_nv18_narrow", [7] * 8, 126, (0,) * 4 + (1,) * 4, ()),
        ("p4d_a100_nv12_tab", [7] * 8, 84, (0,) * 4 + (1,) * 4, ()),
        ("rtx4090_8gpu_pcie_uneven_numa", [0] * 8, 0, (0,) * 6 + (1,) * 2, ()),
        ("v100_cubemesh_oldheader_mlx5", [4] * 8, 6, (None,) * 8, ("mlx5_0",)),
    ],
)
def test_real_tables(name: str, peers: list[int], links: int, numa: tuple[int | None, ...], nics: tuple[str]) -> None:
    matrix = parse.link_matrix(sample(f"topo/{name}.txt"))
    assert [matrix.peers(i) for i in range(len(matrix.nvlinks))] == peers
    assert sum(matrix.nvlinks[0]) == links
    assert matrix.numa_nodes == numa
    assert matrix.nics == nics


@real
def test_real_refusal() -> None:
    with pytest.raises(ParseError, match="no link"):
        parse.link_matrix(sample("topo/NOT_topo_m_p2p_r_8gpu.txt"))


@real
def test_real_csv() -> None:
    for name, not_available in (("h100_query_gpu", 61), ("h100_mig_query_gpu", 71)):
        text = sample(f"csv/{name}.txt")
        (row,) = parse.csv_table(text)
        assert len(row) == 212
        assert row["name"] == "NVIDIA H100 80GB HBM3"
        assert sum(cell is None for cell in row.values()) == not_available + 6 + 1  # 6 deprecated, 1 empty
    (row,) = parse.csv_table(sample("csv/p100_csv_nounits_no_final_newline.txt"))
    assert len(row) == 15
    assert (row["fan.speed"], row["memory.free"]) == (None, "16280")
    cells = sample("csv/err_unknown_error_cell.txt")
    (row,) = parse.csv_table(cells, [f"c{i}" for i in range(cells.count(",") + 1)])
    assert (row["c0"], row["c1"]) == (None, "11264")
    for name in ("err_device_handle_nospace", "err_no_devices", "err_nvml_mismatch_twolines"):
        text = sample(f"csv/{name}.txt")
        with pytest.raises(ParseError) as caught:
            parse.csv_table(text)
        assert str(caught.value) == text.strip()


@real
def test_real_efa() -> None:
    assert len(parse.fi_info(sample("efa/fi_info_p4d_4_named_fabric.txt"))) == 4
    assert parse.fi_info(sample("efa/fi_info_hpc6a_1dev_two_endpoints.txt")) == ("rdmap0s6",)
    assert parse.fi_info(sample("efa/fi_info_none_61.txt")) == ()
    assert parse.rdma_devices(sample("efa/ibv_devices_p4d.txt")) == ("rdmap16s27",)
    assert len(json.loads(sample("efa/describe_instance_topology.json.txt"))["Instances"]) == 4
