"""Nothing is left that costs money, and AWS says so itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from micsctl.aws.instances import Instance, find_instances, list_instances, terminate
from micsctl.aws.inventory import Resource, resources, summary
from micsctl.aws.remove import REMOVAL_ORDER, holders, try_remove
from micsctl.aws.session import Aws
from micsctl.cluster.journal import Journal, LaunchIntent, launched_ids, open_launch
from micsctl.cluster.progress import Progress
from micsctl.errors import Interrupted, MicsctlError, PartialError
from micsctl.home import ClusterFiles

_VISIBLE_AFTER_SECONDS = 60  # a machine of a launch whose answer got lost may show up so late
_LIMIT_SECONDS = 25 * 60  # a placement group counts ended machines as members for up to 15 minutes


@dataclass(frozen=True)
class Down:
    """What `down` removed."""

    instances: tuple[str, ...]  # ids
    removed: tuple[Resource, ...]  # everything else
    seconds: float


def down(aws: Aws, name: str, files: ClusterFiles, *, report: Progress, limit_seconds: float = _LIMIT_SECONDS) -> Down:
    """End the cluster's machines, remove all that carries its tag, and look again. A cluster that is gone is success.

    Deletes the laptop's key and host keys of the cluster at the end. Raises PartialError that lists what remains, and
    Interrupted.
    """
    began = time.monotonic()
    try:
        instances, removed = remove_all(aws, name, Journal(files.journal), report, began + limit_seconds)
    except KeyboardInterrupt:
        raise Interrupted(
            "down was stopped by Ctrl-C", costs=costs_of(aws, name), next=f"micsctl down -n {name}"
        ) from None
    except PartialError:
        raise
    except MicsctlError as error:
        error.costs = error.costs or costs_of(aws, name)
        error.next = error.next or f"micsctl down -n {name}"
        raise
    for path in (files.key, files.known_hosts):
        path.unlink(missing_ok=True)
    return Down(tuple(instances), tuple(removed), time.monotonic() - began)


def costs_of(aws: Aws, name: str) -> str:
    """For an error: what exists under the cluster's tag. Never raises, since another error is being reported."""
    try:
        found = resources(aws, name)
    except MicsctlError as error:
        return f"unknown: {error.what}; whatever exists carries the tag micsctl:cluster={name}"
    if not found:
        return "nothing is running; nothing costs money"
    if not any(resource.costs_money for resource in found):
        return f"nothing costs money; left are\n{summary(found)}"
    return summary(found)


def remove_all(
    aws: Aws, name: str, journal: Journal, report: Progress, deadline: float
) -> tuple[list[str], list[Resource]]:
    """Ids of the machines that were ended, and everything else that was removed.

    `deadline` is a value of time.monotonic(). Raises PartialError with what remains then.
    """
    with report.phase("end the nodes"):
        ended = _end_instances(aws, name, journal, report, deadline)
    with report.phase("remove what they used"):
        removed = _remove_rest(aws, name, report, deadline)
    with report.phase("look again"):
        if left := resources(aws, name):
            raise _partial(aws, name, left)
    if journal.read():
        journal.write("down")
    return ended, removed


def _end_instances(aws: Aws, name: str, journal: Journal, report: Progress, deadline: float) -> list[str]:
    records = journal.read()
    asked: set[str] = set()
    while True:
        seen = _all_instances(aws, name, launched_ids(records))
        if living := [instance.id for instance in seen if instance.alive]:
            terminate(aws, living)
            asked |= set(living)
        pending = [instance for instance in seen if instance.state != "terminated"]
        if not pending and (asked or not _may_still_appear(open_launch(records))):
            return sorted(asked)
        report.note(f"{len(pending)} of {len(seen)} not ended yet" if pending else "a lost launch may still show up")
        if time.monotonic() > deadline:
            raise _partial(aws, name, resources(aws, name))
        time.sleep(aws.settings.poll_seconds)


def _all_instances(aws: Aws, name: str, journaled: Sequence[str]) -> list[Instance]:
    """By tag, and by id those that AWS does not show under the tag (yet)."""
    tagged = list_instances(aws, name)
    shown = {instance.id for instance in tagged}
    return tagged + find_instances(aws, [id for id in journaled if id not in shown])


def _may_still_appear(lost: LaunchIntent | None) -> bool:
    return lost is not None and (datetime.now(UTC) - lost.at).total_seconds() < _VISIBLE_AFTER_SECONDS


def _remove_rest(aws: Aws, name: str, report: Progress, deadline: float) -> list[Resource]:
    removed: dict[str, Resource] = {}
    while left := [resource for resource in resources(aws, name) if resource.kind in REMOVAL_ORDER]:
        left.sort(key=lambda resource: REMOVAL_ORDER.index(resource.kind))
        held = [resource for resource in left if not try_remove(aws, resource)]
        removed |= {resource.id: resource for resource in left if resource not in held}
        if not held:
            continue
        report.note(f"still in use: {held[0].kind} {held[0].id}")
        if time.monotonic() > deadline:
            raise _partial(aws, name, held)
        time.sleep(aws.settings.poll_seconds)
    return list(removed.values())


def _partial(aws: Aws, name: str, left: Sequence[Resource]) -> PartialError:
    groups = [resource.id for resource in left if resource.kind == "security group"]
    users = [f"{group} is used by {holder}" for group in groups for holder in holders(aws, group)]
    return PartialError(
        f"{len(left)} resources of cluster {name!r} are left",
        "\n".join(users) or "AWS has not let go of them in time",
        costs=summary(left),
        next=f"micsctl down -n {name}   (again, in some minutes)",
    )
