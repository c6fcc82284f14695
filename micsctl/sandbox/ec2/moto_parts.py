"""The parts of moto that the sandbox extends or calls: loosely annotated, so they are not type checked."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# read by moto when it is imported
os.environ.update(
    MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION="1",
    MOTO_ENABLE_KEYPAIR_VALIDATION="1",
    MOTO_ENABLE_AMI_VALIDATION="1",
    MOTO_EC2_LOAD_DEFAULT_AMIS="false",
    S3_IGNORE_SUBDOMAIN_BUCKETNAME="true",
)


def _moto(module: str) -> Any:
    return import_module(f"moto.{module}")


ec2_models, instance_models = _moto("ec2.models"), _moto("ec2.models.instances")
eni_models, eip_models = _moto("ec2.models.elastic_network_interfaces"), _moto("ec2.models.elastic_ip_addresses")
ec2_urls, ec2_utils, ssm_models = _moto("ec2.urls"), _moto("ec2.utils"), _moto("ssm.models")
s3_models, s3_responses = _moto("s3.models"), _moto("s3.responses")
s3_exceptions, iam_models = _moto("s3.exceptions"), _moto("iam.models")
responses, werkzeug_app = _moto("core.responses"), _moto("moto_server.werkzeug_app")
if TYPE_CHECKING:
    MotoInstance = Any
    MotoAttachment = Any
    MotoBackend = Any
    MotoResponse = Any
    MotoParameters = Any
else:
    MotoInstance, MotoAttachment = instance_models.Instance, eni_models.Attachment
    MotoBackend, MotoResponse = ec2_models.EC2Backend, _moto("ec2.responses").EC2Response
    MotoParameters = ssm_models.ParameterDict
Ami = _moto("ec2.models.amis").Ami
ActionResult, EmptyResult, BaseResponse = responses.ActionResult, responses.EmptyResult, responses.BaseResponse
DEFAULT_ACCOUNT_ID = _moto("core").DEFAULT_ACCOUNT_ID
EC2ClientError = _moto("ec2.exceptions").EC2ClientError
DependencyViolationError = _moto("ec2.exceptions").DependencyViolationError
Base64EncodedString, utcnow = _moto("core.types").Base64EncodedString, _moto("core.utils").utcnow
