"""What a checkpoint's names, mark and retention say, without torch processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.checkpoint.marks import (
    FileSum,
    Identity,
    Mark,
    Progress,
    differences,
    folder_name,
    parse_name,
    size_problem,
)
from mics.checkpoint.retention import to_remove
from mics.checkpoint.states import spread

MARK = Mark(
    Progress(40, 320),
    Identity({"hidden": 12, "widths": (1, 2)}, {"seed": 0}),
    {"__0_0.distcp": FileSum(4096, "0badcafe"), ".metadata": FileSum(17, "00000000")},
)


@given(st.sets(st.integers(1, 500)), st.integers(0, 6), st.integers(0, 50))
def test_the_newest_and_the_milestones_stay(steps, keep, keep_every):
    gone = to_remove(steps, keep, keep_every)
    stay = steps - set(gone)
    assert gone == sorted(set(gone) & steps)
    assert set(sorted(steps)[-keep:] if keep else steps) <= stay
    assert all(step in stay for step in steps if keep_every and step % keep_every == 0)
    assert set(to_remove(stay, keep, keep_every)) == set()
    if keep and not keep_every:
        assert len(stay) == min(keep, len(steps))


def test_an_example_of_what_stays():
    assert to_remove(range(10, 100, 10), keep=2, keep_every=40) == [10, 20, 30, 50, 60, 70]


@given(st.integers(0, 10**9), st.integers(1, 99))
def test_folder_names_are_read_back(step, attempt):
    assert parse_name(folder_name(step, attempt)) == (step, attempt)


@pytest.mark.parametrize("name", ["step-", "step-4.partial", "xstep-4", "step-4x", "tiny", "step-4.2.3", ""])
def test_other_folders_are_nobodys_checkpoint(name):
    assert parse_name(name) is None


def test_a_mark_survives_json():
    read = Mark.from_json(MARK.to_json())
    assert (read.progress, read.files) == (MARK.progress, MARK.files)
    assert differences(read.identity.model, MARK.identity.model) == ""


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", MARK.to_json()[:60], '{"progress": 1, "identity": {}, "files": {}}']
)
def test_half_a_mark_is_no_mark(text):
    with pytest.raises(ValueError, match="not whole, or of another version"):
        Mark.from_json(text)


def test_sizes_tell_what_is_missing_or_short():
    sizes = {"__0_0.distcp": 4096, ".metadata": 17, "complete.json": 300}
    assert size_problem(MARK, sizes) is None
    assert size_problem(MARK, sizes | {"__0_0.distcp": 17}) == "__0_0.distcp has 17 bytes instead of 4096"
    del sizes["__0_0.distcp"]
    assert size_problem(MARK, sizes) == "__0_0.distcp is missing"


def test_differences_name_what_differs():
    assert differences({"hidden": 12, "heads": 3}, {"hidden": 24, "heads": 3}) == "hidden 12 instead of 24"
    assert differences({}, {"hidden": 24}) == "hidden None instead of 24"


@given(st.lists(st.integers(0, 10**6), max_size=20), st.integers(1, 8))
def test_writing_is_spread_over_the_replicas(tensors, replicas):
    sizes = {str(name): size for name, size in enumerate(tensors)}
    owners = spread(sizes, replicas)
    assert owners.keys() == sizes.keys()
    assert owners == spread(dict(reversed(sizes.items())), replicas)  # ranks may see another order
    loads = [sum(size for name, size in sizes.items() if owners[name] == replica) for replica in range(replicas)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
