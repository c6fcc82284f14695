from __future__ import annotations

import json

import pytest

from micsctl import errors
from micsctl.errors import ExitCode, MicsctlError, PartialError, UsageError


def test_exit_codes_are_the_documented_ones() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FAILURE": 1,
        "USAGE": 2,
        "CAPACITY": 3,
        "QUOTA_OR_PERMISSION": 4,
        "CREDENTIALS": 5,
        "PARTIAL": 6,
        "HEALTH": 7,
        "JOB": 8,
        "INTERRUPTED": 130,
    }


def test_every_error_has_its_own_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MicsctlError)]
    codes = [kind.exit_code for kind in kinds]
    assert sorted(codes) == sorted(set(ExitCode) - {ExitCode.DONE})


def test_an_error_has_four_parts() -> None:
    error = PartialError("down stopped", "RequestLimitExceeded (request 1)", costs="2 instances", next="micsctl down")
    assert str(error) == error.what == "down stopped"
    assert (error.why, error.costs, error.next) == (
        "RequestLimitExceeded (request 1)",
        "2 instances",
        "micsctl down",
    )


def test_an_error_prints_as_json() -> None:
    error = UsageError("bad", next="micsctl init")
    assert json.loads(json.dumps(error.as_json())) == {
        "ok": False,
        "error": {"what": "bad", "why": "", "costs": "", "next": "micsctl init", "exit_code": 2},
    }


def test_the_parts_after_why_go_by_name() -> None:
    with pytest.raises(TypeError):
        UsageError("what", "why", "costs")  # type: ignore[misc]
