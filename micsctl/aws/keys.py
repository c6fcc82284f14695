"""The SSH key of one cluster: made on the laptop, only its public half goes to AWS."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from micsctl.aws.create import Intend
from micsctl.aws.errors import explained
from micsctl.aws.session import Aws
from micsctl.aws.tags import KEY, as_dict, cluster_tags, filters, specification
from micsctl.errors import UsageError


def ensure_key_file(path: Path) -> str:
    """Public key, in OpenSSH's form, of the private key at `path`; an ed25519 key is made (mode 0600) where none is.

    Raises UsageError where the file is not an ed25519 key.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_key(path)
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a readable SSH key", str(error), next=f"rm {path}") from error
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode("ascii")


def _write_key(path: Path) -> None:
    text = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
    draft.replace(path)


def fingerprint(public_key: str) -> str:
    """As `ssh-keygen -l` prints it: SHA256:..."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


def find_key_pair(aws: Aws, cluster: str) -> tuple[str, str] | None:
    """Name and fingerprint of the cluster's key pair in AWS."""
    with explained("look up the key pair"):
        found = aws.ec2.describe_key_pairs(Filters=filters(cluster))["KeyPairs"]
    return (found[0]["KeyName"], as_dict(found[0].get("Tags")).get(KEY, "")) if found else None


def ensure_key_pair(aws: Aws, cluster: str, public_key: str, intend: Intend) -> str:
    """Name of the key pair in AWS; one with another public key is replaced. Only call it while no instance exists."""
    found = find_key_pair(aws, cluster)
    if found and found[1] == fingerprint(public_key):
        return found[0]
    with explained("import the public key"):
        if found:
            aws.ec2.delete_key_pair(KeyName=found[0])
        name = f"micsctl-{cluster}"
        intend("ImportKeyPair", name=name)
        aws.ec2.import_key_pair(
            KeyName=name,
            PublicKeyMaterial=public_key.encode("ascii"),
            TagSpecifications=specification("key-pair", cluster_tags(cluster) | {KEY: fingerprint(public_key)}),
        )
    return name
