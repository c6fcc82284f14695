"""How fast machines compute and communicate: every constant of the time model, with where it comes from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from micsctl.errors import UsageError

Origin = Literal["published", "measured", "fit", "assumed"]


@dataclass(frozen=True)
class Speeds:
    """What the time model must know about one machine and its software; docs/time-model.md says where each stands.

    A calibrated cluster has its own: `replace(speeds, ..., range_share=0.15)`.
    """

    peak_flops: float  # of one device, dense, 16 bit
    peak_flops_fp32: float
    hbm_bytes_per_second: float  # of one device
    link_bytes_per_second: float  # of one node, one way, all cards together
    inside_bytes_per_second: float  # of a ring inside a node, per device
    net_latency_seconds: float  # of one hop of a ring between nodes
    inside_latency_seconds: float  # of one hop inside a node
    ramp_seconds: float  # what a large message loses until all channels of the link are busy
    ramp_bytes: float  # a message of this size loses half of that
    e_max: float  # share of the peak that large matrix products reach
    tau: float  # elementwise operators touch this many times the bytes that a block keeps
    omega: float  # share of the shorter one of compute and communication that is hidden under the other, 0 to 1
    gamma: float  # the link's rate falls with nodes^-gamma
    eta: float  # share of the link that a large message gets on 2 nodes
    hier_eff: float  # share of that which the stage across nodes of a hierarchical collective gets
    range_share: float  # a predicted time may be off by this share, either way
    collectives_per_block: float = 1  # for one gather or reduce-scatter; 1 where a block is one flat buffer


@dataclass(frozen=True)
class Constant:
    value: float
    origin: Origin
    source: str


Constants = Mapping[str, Constant]

_FIT = "fitted, from a prior, to public throughput figures of DeepSpeed and MiCS, all constants marked so together"
_NCCL = "NCCL all-reduce on 2 nodes, awsome-distributed-training; busbw / 1.875, since a tree sends each byte once"
_PLUGIN = "latency that aws-ofi-nccl gives to NCCL"
_GUESS = "no public figure"


def _published(value: float, source: str) -> Constant:
    return Constant(value, "published", source)


def _measured(value: float, source: str) -> Constant:
    return Constant(value, "measured", source)


def _fit(value: float, source: str = _FIT) -> Constant:
    return Constant(value, "fit", source)


def _assumed(value: float, source: str = _GUESS) -> Constant:
    return Constant(value, "assumed", source)


def _device(name: str, peak_flops: float, peak_flops_fp32: float, hbm_bytes_per_second: float) -> Constants:
    sheet = f"NVIDIA's data sheet of {name}"
    return {
        "peak_flops": _published(peak_flops, sheet),
        "peak_flops_fp32": _published(peak_flops_fp32, sheet),
        "hbm_bytes_per_second": _published(hbm_bytes_per_second, sheet),
    }


def _link(gigabits: float) -> Constants:
    return {"link_bytes_per_second": _published(gigabits * 1e9 / 8, "AWS's page of the instance type")}


def _large_messages(curve: str, ramp_seconds: float, ramp_bytes: float, eta: float) -> Constants:
    return {
        "ramp_seconds": _fit(ramp_seconds, f"to the curve of {curve}"),
        "ramp_bytes": _fit(ramp_bytes, f"to the curve of {curve}"),
        "eta": _measured(eta, curve),
    }


def _as(other: str, constants: Constants) -> Constants:
    return {name: replace(constant, origin="assumed", source=f"as {other}") for name, constant in constants.items()}


_P3DN: Constants = {
    **_device("V100", 125e12, 15.7e12, 900e9),
    **_link(100),
    "inside_bytes_per_second": _measured(128e9, "MiCS, VLDB 2022: gather in one node; unverified"),
    "net_latency_seconds": _published(150e-6, _PLUGIN),
    "inside_latency_seconds": _assumed(1e-6, "as p4d"),
    "ramp_seconds": _assumed(0, "11 GB/s for a gather over 64 V100 (MiCS, unverified) leave no room for one"),
    "ramp_bytes": _assumed(4.6e6, "as p4d"),
    "e_max": _fit(0.63),
    "tau": _fit(1.95),
    "omega": _fit(0.52),
    "gamma": _fit(0.15),
    "eta": _fit(0.89),
    "hier_eff": _fit(0.86, "MiCS: hierarchical gather of 128 MB over 2 nodes in 72 % of the flat time; unverified"),
    "range_share": _assumed(0.25, "fitted, not calibrated"),
}
_P4_NETWORK: Constants = {  # the curve was measured on p4de, which has the network of p4d
    **_link(400),
    **_large_messages(_NCCL, 700e-6, 4.6e6, 0.835),
    "net_latency_seconds": _published(75e-6, _PLUGIN),
    "inside_latency_seconds": _measured(1e-6, f"{_NCCL}: 164 us for 8 bytes are 2 hops across and 14 inside"),
}
_P4D: Constants = {
    **_device("A100 40 GB", 312e12, 19.5e12, 1555e9),
    **_P4_NETWORK,
    "inside_bytes_per_second": _measured(230e9, "NCCL all-reduce in one p4d, nccl issue 527"),
    "e_max": _fit(0.73),
    "tau": _fit(1.65, f"{_FIT}; for fused operators"),
    "omega": _fit(0.82),
    "gamma": _fit(0.20),
    "hier_eff": _assumed(0.90),
    "range_share": _assumed(0.25, "fitted, not calibrated"),
}
_P5: Constants = {
    **_as("p4d", _P4D),
    **_device("H100 SXM", 989e12, 67e12, 3350e9),
    **_link(3200),
    **_large_messages(_NCCL, 230e-6, 4.2e6, 0.60),
    "inside_bytes_per_second": _assumed(360e9, "80 % of NVLink's 450 GB/s one way"),
    "net_latency_seconds": _measured(27.5e-6, f"{_NCCL}: 69 us for 8 bytes"),
    "e_max": _assumed(0.60, "H100 keep a smaller share of their peak than A100"),
    "range_share": _assumed(0.40, "nothing fitted"),
}
_P5E: Constants = {**_as("p5", _P5), **_device("H200 SXM", 989e12, 67e12, 4800e9), **_link(3200)}

CONSTANTS: Mapping[str, Constants] = {
    "p3dn.24xlarge": _P3DN,
    "p4d.24xlarge": _P4D,
    "p4de.24xlarge": {**_as("p4d", _P4D), **_device("A100 80 GB", 312e12, 19.5e12, 2039e9), **_P4_NETWORK},
    "p5.48xlarge": _P5,
    "p5e.48xlarge": _P5E,
    "p5en.48xlarge": {**_P5E, "net_latency_seconds": _published(35e-6, _PLUGIN)},
    "p6-b200.48xlarge": {
        **_P5E,
        **_device("B200", 2250e12, 80e12, 8000e9),
        "inside_bytes_per_second": _assumed(720e9, "80 % of NVLink's 900 GB/s one way"),
        "net_latency_seconds": _published(35e-6, _PLUGIN),
    },
    "g5.48xlarge": {
        **_as("p4d", _P4D),
        **_device("A10G", 70e12, 35e12, 600e9),
        **_link(100),
        "inside_bytes_per_second": _assumed(10e9, "PCIe 4 without NVLink, through the host"),
        "range_share": _assumed(0.40, "nothing fitted"),
    },
}


def speeds_of(type_name: str) -> Speeds:
    """The speeds of an instance type. Raises UsageError for one that is not in the table."""
    if type_name not in CONSTANTS:
        raise UsageError(
            f"cannot predict times for {type_name}",
            f"its speeds are not known; known types: {', '.join(CONSTANTS)}",
            next="name one of them",
        )
    return Speeds(**{name: constant.value for name, constant in CONSTANTS[type_name].items()})


def old_deepspeed(speeds: Speeds) -> Speeds:
    """ZeRO-3 as it was when MiCS was compared with it (before DeepSpeed's pull request 1453): nothing overlaps, and
    each of about six tensors of a block is gathered and reduced by itself. Both are assumptions."""
    return replace(speeds, omega=0.0, collectives_per_block=6)
