"""Saving and loading on several ranks: every strategy into every other, in the background, on disk and on S3."""

import resource
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import mics
import pytest
import torch
import torch.distributed as dist
from mics.checkpoint import Identity, Progress, SaveFailedError, Saver, TrainState, check_shared, find_resume, load
from mics.checkpoint import reading as reading_module
from mics.checkpoint import resume as resume_module
from mics.checkpoint.files import StoreReader
from mics.checkpoint.states import part_of_this_rank, tensors_of
from mics.checkpoint.stores import DiskStore, open_store
from mics.config import CheckpointConfig
from mics.errors import RunRefusedError
from mics.precision import FIRST_SCALE, LossScale
from mics.ranks import Place
from mics.topology import RankGrid
from torch import nn
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.distributed

IDENTITY = Identity({"hidden": 7}, {"seed": 0, "sequence": 16})
GRIDS = {  # world size, devices per node, partition size, hierarchical; and how long gathered weights live
    "ddp": (RankGrid(4, 2, 1), True),
    "mics": (RankGrid(4, 2, 2), True),
    "hierarchical": (RankGrid(4, 2, 4, hierarchical=True), True),
    "zero3": (RankGrid(4, 4, 4), True),
    "zero2": (RankGrid(4, 2, 4), "step"),
    "two ranks": (RankGrid(2, 2, 2), True),
    "one replica each": (RankGrid(2, 1, 1), False),
}


class Model(nn.Module):
    """Odd widths, a tied head, a frozen block, a parameter that is never used, a buffer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Parameter(torch.zeros(5))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def forward(self, inputs):
        hidden = self.tokens(inputs)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)


def build(name, seed, steps=0, precision="fp16", optimizer=torch.optim.AdamW, model=Model):
    grid, reshard = GRIDS[name]
    torch.manual_seed(seed)
    model = model()
    mics.apply(model, mics.connect(grid), blocks=model.blocks, reshard=reshard)
    settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:2], "weight_decay": 0.0}, {"params": trained[2:], "weight_decay": 0.1}]
    state = TrainState(model, optimizer(groups, lr=0.1, **settings), LossScale(precision, torch.device("cpu")))
    for step in range(steps):
        train_step(state, step)
    return state


def train_step(state, step=0):
    inputs = torch.arange(8).view(1, 8) + step
    with mics.boundary(state.model, last=True):
        state.model(inputs % 13).pow(2).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.model.seen += 1
    state.scale.update(torch.tensor(float(step % 2)))


def whole(state):
    """Everything that a checkpoint holds, each tensor whole."""
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors_of(state).items()}
    return {name: tensor.clone() for name, tensor in full.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saver(folder, background=False, keep=0, keep_every=0, identity=IDENTITY):
    return Saver(str(folder), identity, CheckpointConfig("/tmp/unused", 1, keep, keep_every, background))


def save(folder, state, step, **settings):
    writer = saver(folder, **settings)
    ended = writer.save(state, Progress(step, 8 * step)) + writer.finish()
    assert [outcome.problem for outcome in ended] == [None]
    return ended[0].checkpoint


def save_cells(folder, names):
    saved = {}
    for name in names:
        state = build(name, seed=1, steps=2)
        with torch.no_grad():
            state.model(torch.zeros(1, 8, dtype=torch.long))  # leaves weights gathered under zero2
        saved[name] = whole(state)
        save(f"{folder}/{name}", state, 2, background=True)
    return saved


def load_cells(folder, names, saved):
    """(from, to) of the pairs that are not bit-equal."""
    different = []
    for source, expected in saved.items():
        for name in names:
            state = build(name, seed=7, steps=1)
            resume = find_resume(f"{folder}/{source}", None, IDENTITY)
            assert resume.progress == Progress(2, 16)
            load(resume.checkpoint, state)
            if not same(whole(state), expected):
                different.append((source, name))
            train_step(state)  # and goes on
    return different


def save_and_load_cells(folder, savers, loaders):
    saved = save_cells(folder, savers)
    return saved, load_cells(folder, loaders, saved)


ALL = ["ddp", "mics", "hierarchical", "zero3", "zero2"]


def check_cells(results, saved):
    assert all(different == [] for _, different in results)
    state = saved["mics"]
    assert "model.head.weight" not in state  # tied: once
    assert {"model.seen", "model.blocks.1.weight", "optimizer.tokens.weight.exp_avg", "scale.value"} <= state.keys()
    assert not [name for name in state if name.startswith("optimizer.blocks.1") or "table" in name]


def test_a_checkpoint_loads_bit_by_bit_at_other_n_p_and_strategy(on_four, on_two):
    for kind in ("disk", "s3"):
        check_cells(on_four.results[kind], on_four.results[kind][0][0])
        assert on_two.results["cells", kind] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_every_strategy_loads_what_every_other_saved(run_ranks, tmp_path, request, kind):
    folder = f"s3://{request.getfixturevalue('bucket')}/runs" if kind == "s3" else tmp_path
    some = ALL if kind == "disk" else ALL[1:3]
    on_four = run_ranks(save_and_load_cells, ranks=4, deadline_s=150, folder=folder, savers=some, loaders=ALL)
    saved = on_four[0][0]
    check_cells(on_four, saved)
    fewer = ["two ranks", "one replica each"]
    assert run_ranks(load_cells, ranks=2, folder=folder, names=fewer, saved=saved) == [[], []]
    back = run_ranks(save_cells, ranks=2, folder=f"{folder}/back", names=fewer)[0]
    assert run_ranks(load_cells, ranks=4, folder=f"{folder}/back", names=["mics", "zero3"], saved=back) == [[]] * 4


def other_states(folder):
    """Optimizers without state, or with other state; and a parameter that is frozen or trained only now."""
    results = {}
    fresh = build("mics", seed=1)
    save(f"{folder}/fresh", fresh, 1)
    trained = build("zero3", seed=2, steps=2)
    load(f"{folder}/fresh/step-1", trained)
    results["no state yet"] = same(whole(trained), whole(fresh)) and not trained.optimizer.state
    train_step(trained)

    momentum = build("mics", seed=1, steps=2, optimizer=torch.optim.SGD)
    save(f"{folder}/sgd", momentum, 2)
    loaded = build("ddp", seed=3, optimizer=torch.optim.SGD)
    loaded.optimizer.param_groups[0]["lr"] = 0.5
    load(f"{folder}/sgd/step-2", loaded)
    results["sgd"] = same(whole(loaded), whole(momentum))
    results["own settings"] = [group["lr"] for group in loaded.optimizer.param_groups] == [0.5, 0.1]

    bf16 = build("mics", seed=4, precision="bf16")
    load(f"{folder}/fresh/step-1", bf16)
    save(f"{folder}/bf16", bf16, 1)
    fp16 = build("mics", seed=4)
    load(f"{folder}/bf16/step-1", fp16)
    results["scales"] = (float(bf16.scale.value), float(fp16.scale.value))
    with pytest.raises(RunRefusedError) as refused:
        load(f"{folder}/sgd/step-2", build("mics", seed=1, model=Larger))
    results["refused"] = str(refused.value)
    return results


class Larger(Model):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.zeros(6))


def test_what_is_not_there_is_left_alone(on_four):
    for results in on_four.results["other states"]:
        refused = results.pop("refused")
        assert refused.endswith("holds another model: it has no model.more (1 are missing)")
        assert results == {
            "no state yet": True,
            "sgd": True,
            "own settings": True,
            "scales": (1.0, FIRST_SCALE),
        }


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in range(8))

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def written(folder, name):
    """(elements saved, elements of the state, bytes that each rank wrote, bytes that this one read and copied)."""
    grid, _ = GRIDS[name]
    model = Wide()
    mics.apply(model, mics.connect(grid), blocks=model.blocks)
    state = TrainState(model, torch.optim.SGD(model.parameters()))
    save(f"{folder}/{name}", state, 1)
    store = open_store(f"{folder}/{name}")
    metadata = StoreReader(store, "step-1").read_metadata()
    saved = sum(chunk.sizes.numel() for tensor in metadata.state_dict_metadata.values() for chunk in tensor.chunks)
    ranks = Counter()
    for entry in metadata.storage_data.values():
        ranks[entry.relative_path] += entry.length
    before = Path("/proc/self/io").read_text().split()
    load(f"{folder}/{name}/step-1", state)
    after = Path("/proc/self/io").read_text().split()
    elements = sum(parameter.numel() for parameter in state.model.parameters())
    copied = sum(tensor.to_local().nbytes for tensor in part_of_this_rank(tensors_of(state)).values())
    return saved, elements, list(ranks.values()), int(after[1]) - int(before[1]), copied


def test_every_shard_is_written_once_by_all_replicas_and_read_by_those_that_need_it(on_four):
    for name in ("ddp", "mics", "zero3"):
        results = on_four.results["written", name]
        saved, elements, ranks, *_ = results[0]
        assert saved == elements == 8 * 96 * 96
        assert len(ranks) == 4
        assert max(ranks) < 1.1 * sum(ranks) / 4  # the work is spread
        assert sum(copied for *_, copied in results) == 4 * elements
        for *_, read_bytes, copied in results:
            assert copied == elements  # a quarter of the bytes: what a rank writes is all that it copies
            share = 4 * elements // GRIDS[name][0].partition_size
            assert share <= read_bytes < 1.3 * share + (1 << 20), name


class GatedStore(DiskStore):
    """Writes of shards wait until the test opens the gate."""

    gate = threading.Event()

    def stream(self, name, mode):
        if mode == "wb" and name.endswith(".distcp"):
            assert self.gate.wait(60)
        return super().stream(name, mode)


def train_meanwhile(folder):
    state = build("mics", seed=1, steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mics.checkpoint.saver.open_store", GatedStore)
        writer = saver(folder, background=True)
    expected = whole(state)
    assert writer.save(state, Progress(1, 8)) == []
    for step in range(3):
        train_step(state, step)  # with collectives of its own
    during = writer.writing and not same(whole(state), expected)
    marked = list(Path(folder).glob("*/complete.json"))
    threading.Timer(0.2, GatedStore.gate.set).start()
    second = whole(state)
    first = writer.save(state, Progress(4, 32))  # waits for the one before
    last = writer.finish()
    results = []
    for outcome, values in ((first[0], expected), (last[0], second)):
        fresh = build("zero3", seed=9)
        load(outcome.checkpoint, fresh)
        results.append(same(whole(fresh), values))
    return during, marked, first[0].step, last[0].step, results


def test_training_goes_on_while_a_checkpoint_is_written(on_four):
    for result in on_four.results["meanwhile"]:
        assert result == (True, [], 1, 4, [True, True])


def limit_file_size(size_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def fail_saves(folder, background):
    """What each save said while one rank has no room for its file."""
    state = build("mics", seed=1, steps=1)
    writer = saver(folder, background=background)
    said = [writer.save(state, Progress(1, 8))]
    said.append(writer._wait())
    limits = {2: 1000, 3: resource.RLIM_INFINITY, 4: 1000, 5: 1000}
    texts = []
    for step, limit in limits.items():
        limit_file_size(limit if dist.get_rank() == 1 else resource.RLIM_INFINITY)
        try:
            said.append(writer.save(state, Progress(step, 8 * step)) + writer._wait())
        except SaveFailedError as error:
            texts.append(str(error))
        train_step(state)
        limit_file_size(resource.RLIM_INFINITY)
        found = find_resume(str(folder), None, IDENTITY)
        texts.append(found.checkpoint.rpartition("/")[2])
    ended = [outcome for outcomes in said for outcome in outcomes]
    return [(each.step, each.checkpoint and each.checkpoint[-6:], each.problem) for each in ended], texts


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_said_and_the_second_time_in_a_row_ends_the_run(on_four, background):
    folder = on_four.folder / f"full {background}"
    for outcomes, texts in on_four.results["full", background]:
        full = f"{folder}/step-{{0}}: rank 1: File too large: {folder}/step-{{0}}/__1_0.distcp"
        assert outcomes == [
            (1, "step-1", None),
            (2, None, full.format(2)),
            (3, "step-3", None),
            (4, None, full.format(4)),
        ]
        last = f"2 checkpoints in a row were not saved, the last: {full.format(5)}"
        assert texts == ["step-1", "step-3", "step-3", last, "step-3"]
    left = {path.name: (path / "complete.json").exists() for path in folder.iterdir() if path.is_dir()}
    assert left == {"step-1": True, "step-3": True, "step-5": False}


def last_save_fails(folder):
    state = build("mics", seed=1, steps=1)
    writer = saver(folder, background=True)
    limit_file_size(1000 if dist.get_rank() == 0 else resource.RLIM_INFINITY)
    writer.save(state, Progress(1, 8))
    with pytest.raises(SaveFailedError) as failed:
        writer.finish()
    limit_file_size(resource.RLIM_INFINITY)
    return str(failed.value)


def test_a_run_whose_last_save_fails_does_not_end_well(on_four):
    for text in on_four.results["last"]:
        where = f"{on_four.folder}/last/step-1"
        assert text.startswith(f"the last checkpoint (step 1) was not saved: {where}: rank 0: File too large")


def save_twice_at_once(folder):
    """Two runs on one folder: the one that was started first must not save any more."""
    state = build("mics", seed=1, steps=1)
    earlier = saver(folder)
    first = earlier.save(state, Progress(1, 8))
    later = saver(folder)
    refused = earlier.save(state, Progress(2, 16))
    kept = later.save(state, Progress(2, 16))
    with pytest.raises(SaveFailedError, match="belongs to a run that was started later"):
        earlier.save(state, Progress(3, 24))
    return [outcome.problem for outcome in first + refused + kept], open_store(folder).folders()


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_of_two_runs_at_once_only_the_one_that_was_started_last_saves(on_four, kind):
    where = f"{on_four.folder if kind == 'disk' else on_four.bucket}/twice"
    for results in on_four.results["twice", kind]:
        assert results == ([None, f"{where} belongs to a run that was started later", None], ["step-1", "step-2"])


def unreadable_for_one(folder, state):
    """What each rank hears where the store fails on rank 2 alone; nobody waits."""
    checkpoint = save(folder, state, 1)
    said = []
    for ask in (lambda: find_resume(folder, None, IDENTITY), lambda: load(checkpoint, state)):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 2:
                for module in (resume_module, reading_module):
                    patch.setattr(module, "open_store", refuse)
            with pytest.raises(RunRefusedError) as error:
                ask()
        said.append(str(error.value))
    return said


def refuse(*_):
    raise RunRefusedError("no credentials")


def test_a_store_that_fails_on_one_rank_is_refused_on_all(on_four):
    for said in on_four.results["unreadable"]:
        assert said == ["rank 2: no credentials"] * 2


def keep_some(folder):
    state = build("mics", seed=1, steps=1)
    writer = saver(f"{folder}/a", background=True, keep=2, keep_every=4)
    neighbour = save(f"{folder}/ab", state, 1)
    left = []
    for step in range(1, 8):
        writer.save(state, Progress(step, 8 * step))
        writer.finish()
        left.append(sorted(name for name in open_store(f"{folder}/a").folders()))
    again = writer.save(state, Progress(7, 56)) + writer.finish()
    dist.barrier()
    return left, again[-1].checkpoint, find_resume(f"{folder}/a", None, IDENTITY).checkpoint, neighbour


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_old_checkpoints_go_once_a_new_one_is_whole(on_four, kind):
    folder = f"{on_four.bucket}/keep" if kind == "s3" else f"{on_four.folder}/keep"
    left, again, found, neighbour = on_four.results["keep", kind][0]
    assert left[-1] == ["step-4", "step-6", "step-7"]
    assert left[2] == ["step-2", "step-3"]
    assert again == found == f"{folder}/a/step-7.2"
    assert open_store(f"{folder}/a").folders() == ["step-4", "step-6", "step-7.2"]
    assert neighbour == f"{folder}/ab/step-1"
    assert open_store(f"{folder}/ab").folders() == ["step-1"]


def damage(folder, step, kind):
    checkpoint = Path(folder) / f"step-{step}"
    shard, mark = checkpoint / "__1_0.distcp", checkpoint / "complete.json"
    content = shard.read_bytes()
    match kind:
        case "flipped":
            shard.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        case "short":
            shard.write_bytes(content[:17])
        case "gone":
            shard.unlink()
        case "no mark":
            mark.unlink()
        case "half a mark":
            mark.write_text(mark.read_text()[:30])


def resumes(folder):
    state = build("mics", seed=1, steps=1)
    kinds = ["flipped", "short", "gone", "no mark", "half a mark"]
    for step in range(1, 7):
        save(f"{folder}/own", state, step)
    save(f"{folder}/other", state, 9)
    first = dist.get_rank() == 0
    size = (Path(folder) / "own" / "step-3" / "__1_0.distcp").stat().st_size
    dist.barrier()
    if first:
        for step, kind in enumerate(kinds, 2):
            damage(f"{folder}/own", step, kind)
    dist.barrier()
    found = find_resume(f"{folder}/own", f"{folder}/other", IDENTITY)
    one = find_resume(f"{folder}/new", f"{folder}/other/step-9", IDENTITY)
    newer = find_resume(f"{folder}/new", f"{folder}/other", IDENTITY)
    fresh = find_resume(f"{folder}/new", None, IDENTITY)
    changed = find_resume(None, f"{folder}/other", Identity(IDENTITY.model, {"seed": 1, "sequence": 16}))
    writer = saver(f"{folder}/own", keep=1)
    writer.save(state, Progress(7, 56))
    dist.barrier()  # rank 0 has removed the old ones
    left = open_store(f"{folder}/own").folders()
    refused = []
    dist.barrier()
    if first:
        damage(f"{folder}/own", 7, "flipped")
        damage(f"{folder}/other", 9, "short")
    dist.barrier()
    other_model = Identity({"hidden": 8}, IDENTITY.data)
    for own, origin, identity in (
        (f"{folder}/own", f"{folder}/other", IDENTITY),
        (f"{folder}/new", f"{folder}/other", IDENTITY),
        (f"{folder}/new", f"{folder}/nothing", IDENTITY),
        (f"{folder}/new", f"{folder}/nothing/step-3", IDENTITY),
    ):
        with pytest.raises(RunRefusedError) as error:
            find_resume(own, origin, identity)
        refused.append(str(error.value))
    save(f"{folder}/third", state, 1)
    with pytest.raises(RunRefusedError) as error:
        find_resume(f"{folder}/third", None, other_model)
    return found, one, newer, fresh, changed, left, [*refused, str(error.value)], size


def test_a_run_goes_on_from_the_newest_whole_one_and_says_what_it_skipped(on_four):
    results, tmp_path = on_four.results["resumes"], on_four.folder / "resumes"
    assert all(result[:7] == results[0][:7] for result in results)
    found, one, newer, fresh, changed, left, refused, size = results[0]
    assert (found.checkpoint, found.progress) == (f"{tmp_path}/own/step-1", Progress(1, 8))
    half, never, gone, short, flipped, unused = found.notes
    assert half.startswith("skipped step-6: complete.json is not whole, or of another version")
    assert never == "skipped step-5: it was never finished (no complete.json)"
    assert gone == "skipped step-4: __1_0.distcp is missing"
    assert short == f"skipped step-3: __1_0.distcp has 17 bytes instead of {size}"
    assert flipped.startswith("skipped step-2: __1_0.distcp has CRC-32 ")
    assert unused == f"resume_from {tmp_path}/other is not used: this run goes on from its own"
    for resume in (one, newer):
        assert (resume.checkpoint, resume.progress, resume.notes) == (f"{tmp_path}/other/step-9", Progress(9, 72), ())
    assert (fresh.checkpoint, fresh.progress, fresh.notes) == (None, Progress(), ())
    assert changed.progress == Progress(9, 0)
    assert changed.notes == (
        "samples are counted from 0 again, since the data of this run is not that of "
        f"{tmp_path}/other/step-9: seed 1 instead of 0",
    )
    # step-1 and, as far as sizes tell, step-2 were whole and old, step-5 never finished; damaged ones stay
    assert left == ["step-3", "step-4", "step-6", "step-7"]
    own, other, nothing, one_of_nothing, model = refused
    assert own.startswith("all checkpoints of this run are damaged (skipped step-7: __1_0.distcp has CRC-32")
    assert other == (
        f"resume_from: {tmp_path}/other holds no whole checkpoint (skipped step-9: __1_0.distcp has 17 bytes "
        f"instead of {size})"
    )
    assert nothing == f"resume_from: {tmp_path}/nothing holds no whole checkpoint"
    assert one_of_nothing.endswith("/nothing/step-3 holds no whole checkpoint (skipped step-3: nothing is there)")
    assert model == f"{tmp_path}/third/step-1 holds another model than train.model: hidden 7 instead of 8"


def see(paths):
    """What this rank says of a path that is its own, or of one that all see."""
    place = Place(dist.get_rank(), 0, dist.get_world_size(), 1)
    try:
        check_shared(paths[place.rank], "token", place)
    except RunRefusedError as error:
        return str(error)
    return None


def test_a_path_must_be_seen_by_every_node(on_four, on_two):
    folder, results = on_four.folder, on_two.results
    assert results["see", "both"] == results["see", "s3"] == [None, None]
    assert open_store(f"{folder}/both").sizes_bytes("") == open_store(f"{on_four.bucket}/both").sizes_bytes("") == {}
    one, two = results["see", "apart"]
    assert one == two
    assert one.startswith(f"node 1: train.checkpoint.path {folder}/two is not shared")
    missing = results["see", "no bucket"][0]
    assert missing.startswith("node 0: train.checkpoint.path s3://no-such-bucket/runs cannot be written: s3://no-such")
    assert "NoSuchBucket" in missing


def on_four_ranks(folder, bucket):
    """Everything that four ranks are needed for, in one start."""
    return {
        "disk": save_and_load_cells(folder, ["mics"], ["ddp", "hierarchical"]),
        "s3": save_and_load_cells(bucket, ["mics"], ["zero3"]),
        "other states": other_states(f"{folder}/other states"),
        **{("written", name): written(f"{folder}/written", name) for name in ("ddp", "mics", "zero3")},
        "meanwhile": train_meanwhile(f"{folder}/meanwhile"),
        **{("full", background): fail_saves(f"{folder}/full {background}", background) for background in (False, True)},
        "last": last_save_fails(f"{folder}/last"),
        ("twice", "disk"): save_twice_at_once(f"{folder}/twice"),
        ("twice", "s3"): save_twice_at_once(f"{bucket}/twice"),
        "unreadable": unreadable_for_one(f"{folder}/unreadable", build("mics", seed=1, steps=1)),
        ("keep", "disk"): keep_some(f"{folder}/keep"),
        ("keep", "s3"): keep_some(f"{bucket}/keep"),
        "resumes": resumes(f"{folder}/resumes"),
    }


def on_two_ranks(folder, bucket, saved):
    return {
        ("cells", "disk"): load_cells(folder, ["two ranks"], saved["disk"]),
        ("cells", "s3"): load_cells(bucket, ["one replica each"], saved["s3"]),
        ("see", "both"): see([f"{folder}/both"] * 2),
        ("see", "s3"): see([f"{bucket}/both"] * 2),
        ("see", "apart"): see([f"{folder}/one", f"{folder}/two"]),
        ("see", "no bucket"): see(["s3://no-such-bucket/runs"] * 2),
    }


@dataclass
class Ranks:
    """results[part]: what each rank returned."""

    folder: Path
    bucket: str
    results: dict


def by_part(ranks):
    return {part: [each[part] for each in ranks] for part in ranks[0]}


@pytest.fixture(scope="module")
def on_four(run_ranks, s3_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    s3_server.create_bucket(Bucket="ranks")
    where = {"folder": folder, "bucket": "s3://ranks/runs"}
    return Ranks(**where, results=by_part(run_ranks(on_four_ranks, ranks=4, deadline_s=200, **where)))


@pytest.fixture(scope="module")
def on_two(run_ranks, on_four):
    saved = {kind: on_four.results[kind][0][0] for kind in ("disk", "s3")}
    where = {"folder": on_four.folder, "bucket": on_four.bucket}
    return Ranks(**where, results=by_part(run_ranks(on_two_ranks, ranks=2, deadline_s=120, saved=saved, **where)))
