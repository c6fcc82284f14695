"""Ids of AWS's form."""

from __future__ import annotations

import hashlib


def hex_id(*parts: object) -> str:
    """17 hex digits, the same for the same parts."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:17]
