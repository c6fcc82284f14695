"""Durations as people write them: `90s`, `30m`, `12h`, `2d`."""

from __future__ import annotations

import re
from datetime import timedelta

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_SECONDS = 365 * 86400


def parse_duration(text: object) -> timedelta:
    """Raises ValueError for anything but a number and a unit, for zero, and for more than a year."""
    if isinstance(text, timedelta):
        return text
    match = re.fullmatch(r"([0-9]+)([smhd])", text) if isinstance(text, str) else None
    if not match or int(match[1]) == 0:
        raise ValueError(f"give a duration such as 90s, 30m, 12h or 2d, not {text!r}")
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]]
    if seconds > _LONGEST_SECONDS:
        raise ValueError(f"{text} is longer than a year")
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """The shortest form that `parse_duration` reads back."""
    seconds = int(duration.total_seconds())
    unit = next(u for u in "dhms" if seconds % _UNIT_SECONDS[u] == 0)
    return f"{seconds // _UNIT_SECONDS[unit]}{unit}"
