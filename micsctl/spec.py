"""mics.yaml as strict models. An unknown key is an error with the nearest match and its line.

The `train:` section is validated with the trainer's own dataclasses (`mics.config`), so nothing is defined twice.
"""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from mics.config import TrainConfig
from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from micsctl.duration import format_duration, parse_duration
from micsctl.errors import UsageError

FILE_NAME = "mics.yaml"
_WORD = "tag:yaml.org,2002:str"
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")
}


def format_bytes_binary(size: int) -> str:
    """The shortest form with a binary unit that reads back to the same number of bytes."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return f"{size}B"


Duration = Annotated[timedelta, BeforeValidator(parse_duration), PlainSerializer(format_duration, return_type=str)]
Bytes = Annotated[ByteSize, PlainSerializer(format_bytes_binary, return_type=str)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ClusterSpec(_Strict):
    """The machines."""

    type: str = Field("p4d.24xlarge", pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")
    nodes: int = Field(4, ge=1, le=1000)
    region: str = Field("us-east-1", pattern=r"^[a-z0-9-]+$")
    zones: tuple[str, ...] = ()  # in this order; empty = every zone that offers the type
    ttl: Duration = timedelta(hours=12)  # the nodes end by themselves after this
    reach: Literal["head"] = "head"  # Elastic IP on node 0, the others through it
    subnet: str | None = None  # None = an own VPC
    image: str | None = None  # AMI id or SSM parameter name; None = the Deep Learning Base AMI
    ssh_user: str = Field("ubuntu", pattern=r"^[a-z_][a-z0-9_-]*$")
    volume_gb: int = Field(200, ge=8, le=16384)
    # its role is what the nodes have on AWS, S3 for one; None = nothing
    instance_profile: str | None = Field(None, pattern=r"^[\w+=,.@-]{1,128}$")


class SandboxSpec(_Strict):
    """What the emulated machines look like. Ignored by `provider: aws`."""

    devices_per_node: int = Field(2, ge=1, le=8)
    # in place of the type's; the default cannot hold gpt-3m's model states, but half of them
    device_memory: Bytes = Field(ByteSize(54 << 20), ge=1)
    links: Literal["p3dn", "p4d", "measured", "none"] = "p3dn"
    link_mbps: int | None = Field(None, ge=1, le=100_000)  # in place of `links`
    level: Literal["auto", "netns", "process"] = "auto"


class Spec(_Strict):
    """The one file."""

    name: str = Field("demo", pattern=r"^[a-z][a-z0-9-]{0,30}$")
    provider: Literal["aws", "sandbox"] = "sandbox"
    cluster: ClusterSpec = ClusterSpec()
    sandbox: SandboxSpec = SandboxSpec()
    train: TrainConfig = TrainConfig()

    @field_validator("train")
    @classmethod
    def _nodes_may_use_s3(cls, train: TrainConfig, info: ValidationInfo) -> TrainConfig:
        """No key is ever put on a node: it reaches S3 by the role of its instance profile, or not at all."""
        used = {
            "checkpoint.path": [train.checkpoint.path] if train.checkpoint.every else [],
            "data": train.data,
            "validation.data": train.validation.data,
        }
        cluster = info.data.get("cluster")
        for key, names in used.items():
            if cluster and not cluster.instance_profile and any(name.startswith("s3://") for name in names):
                raise ValueError(f"{key} is in S3, so cluster.instance_profile must name a role that may use it")
        return train


def find_file(start: Path) -> Path | None:
    """mics.yaml in `start` or the nearest folder above it, as git looks for its own."""
    folder = start.absolute()
    return next((f / FILE_NAME for f in (folder, *folder.parents) if (f / FILE_NAME).is_file()), None)


def load(path: Path) -> Spec:
    """Read mics.yaml. Raises UsageError that names file, line, key, and the nearest known key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {path}", str(reason), next="micsctl init") from None
    return parse(text, str(path))


def parse(text: str, origin: str = FILE_NAME) -> Spec:
    """Parse the text of mics.yaml; `origin` names it in errors."""
    try:
        reader = YAML(typ="rt")
        reader.composer.warn_double_anchors = False  # no anchor is taken at all
        _check_plain(reader.compose(text), origin)
        data: Any = reader.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{origin}{line} is not valid YAML", str(error.problem or error.context)) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not valid YAML", str(error).splitlines()[0] if str(error) else "") from None
    if data is None:
        return Spec()
    if not isinstance(data, CommentedMap):
        raise UsageError(f"{origin} must hold keys and values", "for example `name: demo`", next="micsctl init")
    try:
        # JSON mode: strict types, yet a list may become a tuple
        return Spec.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        lines = _explain_all(error.errors(include_url=False), data, origin)
        raise UsageError(f"{origin} is not valid", "\n".join(lines), next=f"edit {origin}") from None


def override(spec: Spec, *, name: str | None = None, region: str | None = None, ttl: str | None = None) -> Spec:
    """The spec with what flags and environment say. Raises UsageError for a value that the file could not hold."""
    raw = spec.model_dump(mode="json")
    raw["name"] = name or spec.name
    raw["cluster"]["region"] = region or spec.cluster.region
    raw["cluster"]["ttl"] = raw["cluster"]["ttl"] if ttl is None else ttl
    try:
        return Spec.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in faults]
        raise UsageError("a flag or an environment variable is not valid", "\n".join(lines)) from None


def dump(spec: Spec) -> str:
    """The spec as YAML with every default; `parse` reads it back to an equal spec."""
    yaml = YAML()
    yaml.default_flow_style = False
    stream = io.StringIO()
    yaml.dump(spec.model_dump(mode="json"), stream)
    return stream.getvalue()


def _check_plain(node: Node | None, origin: str) -> None:
    """Refuse anchors, tags, merges and keys that are no words: mics.yaml needs none, and not all of them load."""
    if node is None:
        return
    where = f"{origin}:{node.start_mark.line + 1}"
    if node.anchor or node.tag not in _PLAIN_TAGS:
        raise UsageError(f"{origin} is not valid", f"{where}: anchors and tags (&, *, !) have no place here")
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.tag != _WORD:
                line = key.start_mark.line + 1
                raise UsageError(f"{origin} is not valid", f"{origin}:{line}: a key must be a word")
            _check_plain(key, origin)
            _check_plain(value, origin)
    elif isinstance(node, SequenceNode):
        for item in node.value:
            _check_plain(item, origin)


def _explain_all(errors: Sequence[ErrorDetails], data: CommentedMap, origin: str) -> list[str]:
    """One line per faulty key. Pydantic reports every branch of a union; those that cannot be meant are left out."""
    # where a mapping was given, the branch that wants a word is not meant, if there is another
    meant = [e for e in errors if not (isinstance(e["input"], dict) and e["type"] in ("string_type", "literal_error"))]
    by_key: dict[tuple[str, ...], list[tuple[int, ErrorDetails]]] = {}
    for detail in meant or errors:
        line, path = _locate(data, detail)
        by_key.setdefault(tuple(path), []).append((line, detail))
    return [
        f"{origin}:{found[0][0]}: {_explain('.'.join(path), [detail for _, detail in found])}"
        for path, found in by_key.items()
    ]


def _explain(key: str, details: Sequence[ErrorDetails]) -> str:
    first = details[0]
    *parents, last = key.split(".")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(parents)
        near = difflib.get_close_matches(last, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    messages = [d["msg"].removeprefix("Value error, ") for d in details]
    message = " or ".join([messages[0], *(m.removeprefix("Input should be ") for m in messages[1:])])
    if first["type"] == "missing" or first["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {message}, got {json.dumps(first['input'], default=str)}"


def _locate(data: CommentedMap, detail: ErrorDetails) -> tuple[int, list[str]]:
    """Line (from 1) and key path of an error; parts of its `loc` that name a union branch are no keys."""
    line, path = 1, list[str]()
    here: Any = data
    for part in detail["loc"]:
        if isinstance(here, CommentedMap):
            key = next((k for k in here if str(k) == part), None)
            if key is None:
                continue
            line = here.lc.key(key)[0] + 1
        elif isinstance(here, CommentedSeq) and isinstance(part, int):
            key = part
            line = here.lc.item(part)[0] + 1
        else:
            continue
        path.append(str(part))
        here = here[key]
    if detail["type"] == "missing":
        path.append(str(detail["loc"][-1]))
    if detail["type"] == "value_error":
        line = _line_named(detail["msg"].removeprefix("Value error, "), here, path) or line
    return line, path


def _line_named(message: str, section: Any, path: Sequence[str]) -> int | None:
    """Line of the key that a section's own message begins with ("checkpoint.every must be ..."), where it is there."""
    first, *rest = message.split(" ")[0].split(".")
    key = rest[0] if rest and first == path[-1] else first
    return section.lc.key(key)[0] + 1 if isinstance(section, CommentedMap) and key in section else None


def _known_keys(path: Sequence[str]) -> list[str]:
    """The keys that may stand in the section at `path`."""
    here: Any = Spec
    for part in path:
        here = _section(here, part)
    if here is not None and is_dataclass(here):
        return [f.name for f in fields(here)]
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def _section(parent: Any, key: str) -> Any:
    if isinstance(parent, type) and issubclass(parent, BaseModel):
        return parent.model_fields[key].annotation
    hint = get_type_hints(parent).get(key)
    return next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None)
