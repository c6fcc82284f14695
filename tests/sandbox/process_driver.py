"""Stands for the sandbox's server in tests: drives ProcessHosts by JSON lines on stdin, tells events on stdout."""

import base64
import json
import sys
from pathlib import Path

from micsctl.errors import MicsctlError
from micsctl.sandbox.hosts import HostRequest, HostsSettings
from micsctl.sandbox.process import ProcessHosts
from micsctl.sandbox.state import SandboxFolder


def tell(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")  # one write: events come from several threads
    sys.stdout.flush()


def main() -> None:
    folder, port, python = SandboxFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    folder.hosts.mkdir(mode=0o700)
    urls = "http://127.0.0.1:9/imds", "http://127.0.0.1:9"
    settings = HostsSettings(folder.id, folder.hosts, folder.shared, "ubuntu", None, *urls)
    try:
        hosts = ProcessHosts(settings, ssh_port=port, python=python)
    except MicsctlError as error:
        tell(error=error.what, why=error.why, next=error.next)
        return
    tell(vpc=hosts.vpc_cidr, public=hosts.public_cidr, user=hosts.ssh_user, port=hosts.ssh_port)
    for line in sys.stdin:
        message = json.loads(line)
        match message["op"]:
            case "start":
                nodes = [{**node, "user_data": base64.b64decode(node["user_data"])} for node in message["nodes"]]
                hosts.start(
                    [HostRequest(**node) for node in nodes],
                    lambda instance_id: tell(running=instance_id),
                    lambda instance_id: tell(ended=instance_id),
                )
            case "stop":
                hosts.stop(message["ids"])
            case "console":
                tell(console=hosts.console(message["id"]))
            case "ready":
                tell(ready=hosts.ssh_ready(message["id"]))
            case "route":
                hosts.route(message["ip"], message["id"])
    hosts.close()
    tell(closed=True)


main()
