"""The sandbox's classes in moto's places.

moto has no plug-ins. Its response, backend, instance and attachment classes are subclassed and put in moto's places by
`install`, before the first request; `install` fails loudly where a place is not what it was. Which behaviour comes from
which public source stands in docs/sandbox.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from micsctl.sandbox.ec2.addresses import AddressActions
from micsctl.sandbox.ec2.backend import SandboxBackend
from micsctl.sandbox.ec2.emulator import Emulator
from micsctl.sandbox.ec2.images import SandboxParameters
from micsctl.sandbox.ec2.instances import InstanceActions
from micsctl.sandbox.ec2.launch import LaunchActions
from micsctl.sandbox.ec2.models import SandboxAttachment, SandboxInstance
from micsctl.sandbox.ec2.moto_parts import (
    DEFAULT_ACCOUNT_ID,
    BaseResponse,
    MotoBackend,
    ec2_models,
    ec2_urls,
    ec2_utils,
    eip_models,
    eni_models,
    iam_models,
    instance_models,
    ssm_models,
    werkzeug_app,
)
from micsctl.sandbox.ec2.network import NetworkActions
from micsctl.sandbox.ec2.placement import PlacementActions
from micsctl.sandbox.faults import FaultBook
from micsctl.sandbox.hosts import NodeHosts

NODE_PROFILE = "mics-nodes"


class SandboxResponse(PlacementActions, LaunchActions, InstanceActions, AddressActions, NetworkActions):
    """One request of any action."""


def install(hosts: NodeHosts, faults: FaultBook) -> tuple[Emulator, Callable[..., Any]]:
    """Put the classes above in moto's places; what to ask, and the WSGI application that answers requests.

    Once in a process. Raises RuntimeError where moto is not the moto that this was written for.
    """
    _check_touch_points()
    emulator = Emulator(hosts, faults)
    SandboxBackend.emulator = SandboxResponse.emulator = emulator
    ec2_urls.url_paths["{0}/"] = SandboxResponse.dispatch
    ec2_models.ec2_backends.backend = SandboxBackend
    instance_models.Instance = SandboxInstance
    eni_models.Attachment = SandboxAttachment
    eni_models.random_public_ip = emulator.free_public_address
    eip_models.random_ip = emulator.free_public_address
    ssm_models.ParameterDict = SandboxParameters
    ec2_utils.filter_dict_attribute_mapping.update(
        {"placement-group-name": "placement.group_name", "client-token": "client_token"}
    )
    ec2_utils.EC2_RESOURCE_TO_PREFIX["placement-group"] = "pg"
    ec2_utils.EC2_PREFIX_TO_RESOURCE["pg"] = "placement-group"
    _make_profile()
    return emulator, werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)


def _make_profile() -> None:
    """The instance profile that somebody with the right to do so has made in this account: its role may use S3."""
    iam = iam_models.iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    iam.create_role(NODE_PROFILE, document, "/", None, "nodes of the sandbox", [], None)
    iam.create_instance_profile(NODE_PROFILE, "/", [NODE_PROFILE])


def _check_touch_points() -> None:
    places = {
        "moto.ec2.urls.url_paths": "{0}/" in ec2_urls.url_paths,
        "moto.ec2.models.ec2_backends": ec2_models.ec2_backends.backend is MotoBackend,
        "no request was answered yet": not list(ec2_models.ec2_backends.iter_backends()),
        "EC2Backend.create_default_vpc": hasattr(MotoBackend, "create_default_vpc"),
        "moto.ec2.models.instances.Instance": isinstance(getattr(instance_models, "Instance", None), type),
        "Instance._state": "_state" in instance_models.Instance.__init__.__code__.co_names,
        "Instance._placement": "_placement" in instance_models.Instance.__init__.__code__.co_names,
        "Attachment.network_card_index": "network_card_index" in eni_models.Attachment.__init__.__code__.co_names,
        "elastic_network_interfaces.random_public_ip": hasattr(eni_models, "random_public_ip"),
        "elastic_ip_addresses.random_ip": hasattr(eip_models, "random_ip"),
        "IAMBackend.create_instance_profile": hasattr(iam_models.IAMBackend, "create_instance_profile"),
        "moto.ssm.models.ParameterDict": hasattr(ssm_models, "ParameterDict"),
        "moto.ec2.utils.filter_dict_attribute_mapping": hasattr(ec2_utils, "filter_dict_attribute_mapping"),
        "moto.ec2.utils.EC2_RESOURCE_TO_PREFIX": hasattr(ec2_utils, "EC2_RESOURCE_TO_PREFIX"),
        **{
            f"BaseResponse.{name}": hasattr(BaseResponse, name)
            for name in ("_dispatch", "call_action", "_get_action", "serialized", "_enrich_response", "_get_param")
        },
    }
    if missing := [name for name, there in places.items() if not there]:
        raise RuntimeError(f"this moto is not the one that the sandbox was written for: {', '.join(missing)}")
