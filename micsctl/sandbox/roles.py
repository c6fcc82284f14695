"""Temporary credentials of instance roles. Made and checked from one secret, so that nothing has to be kept.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from micsctl.sandbox.auth import Key

_LIFE_SECONDS = 6 * 3600
_FRESH_SECONDS = 3600  # an instance is given new ones every hour, long before the old ones end


@dataclass(frozen=True)
class RoleCredentials:
    """What an instance signs its requests with, until `ends_at`."""

    key: Key
    token: str
    instance_id: str
    role: str
    starts_at: datetime
    ends_at: datetime


class RoleKeys:
    """All credentials that one sandbox has given out and will give out."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def credentials(self, instance_id: str, role: str, now: datetime) -> RoleCredentials:
        """The same for an hour."""
        seconds = int(now.timestamp())
        return self._make(instance_id, role, seconds - seconds % _FRESH_SECONDS)

    def find(self, token: str) -> RoleCredentials | None:
        """Those with this session token, ended ones too; None where it is not one of this sandbox."""
        text, _, mac = token.partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac("token", text).encode()):
            return None
        instance_id, role, starts_at = json.loads(base64.urlsafe_b64decode(text))
        return self._make(instance_id, role, starts_at)

    def _make(self, instance_id: str, role: str, starts_at: int) -> RoleCredentials:
        text = base64.urlsafe_b64encode(json.dumps([instance_id, role, starts_at]).encode()).decode()
        return RoleCredentials(
            key=Key(f"ASIA{self._mac('id', text)[:16].upper()}", self._mac("key", text)[:40]),
            token=f"{text}.{self._mac('token', text)}",
            instance_id=instance_id,
            role=role,
            starts_at=datetime.fromtimestamp(starts_at, UTC),
            ends_at=datetime.fromtimestamp(starts_at + _LIFE_SECONDS, UTC),
        )

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.digest(self._secret, f"{purpose}/{text}".encode(), "sha256").hex()
