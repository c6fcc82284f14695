"""Where this laptop's SSH comes from."""

from __future__ import annotations

import ipaddress
import urllib.request

from micsctl.aws.settings import AwsSettings
from micsctl.errors import MicsctlError

_SERVICE = "https://checkip.amazonaws.com"


def find_caller_cidr(settings: AwsSettings) -> str:
    """This laptop's public address as a /32, or what the settings say.

    Raises MicsctlError where AWS's address service does not answer with an IPv4 address.
    """
    if settings.caller_cidr:
        return settings.caller_cidr
    try:
        with urllib.request.urlopen(_SERVICE, timeout=10) as answer:
            return f"{ipaddress.IPv4Address(answer.read(64).decode('ascii').strip())}/32"
    except (OSError, ValueError) as error:
        raise MicsctlError(
            "could not find this machine's public address", f"{_SERVICE}: {error}", next="check the network"
        ) from error
