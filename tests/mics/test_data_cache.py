"""Data in S3, against an S3 server on this machine."""

import boto3
import pytest
from mics.data.cache import cache_folder, on_this_disk
from mics.errors import RunRefusedError
from moto.server import ThreadedMotoServer

OBJECTS = {
    "corpus/a.txt": b"first",
    "corpus/sub/b.txt": b"second" * 100,
    "corpus/.hidden": b"no",
    "corpus/folder/": b"",
    "corpus-2/c.txt": b"another",
    "tokens/train.bin": b"abcd",
    "tokens/train.json": b'{"dtype": "uint16"}',
    "tokens/training.bin": b"no",
}


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    """A client of S3, where the bucket of that name holds OBJECTS."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for key, content in OBJECTS.items():
        client.put_object(Bucket="bucket", Key=key, Body=content)
    yield client
    for item in client.list_objects_v2(Bucket="bucket").get("Contents", ()):
        client.delete_object(Bucket="bucket", Key=item["Key"])
    client.delete_bucket(Bucket="bucket")


def contents(folder):
    """What find_files would read below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_prefix_is_copied_and_other_names_stay(bucket, tmp_path):
    names = on_this_disk(["stdlib", "s3://bucket/corpus/", "/fsx/x"], tmp_path, copy=True)
    assert names == ("stdlib", str(tmp_path / "bucket/corpus"), "/fsx/x")
    assert contents(tmp_path) == {"bucket/corpus/a.txt": b"first", "bucket/corpus/sub/b.txt": b"second" * 100}


def test_a_token_file_brings_its_index(bucket, tmp_path):
    assert on_this_disk(["s3://bucket/tokens/train.bin"], tmp_path, copy=True) == (
        f"{tmp_path}/bucket/tokens/train.bin",
    )
    assert set(contents(tmp_path / "bucket/tokens")) == {"train.bin", "train.json"}


def test_the_other_ranks_of_a_node_only_learn_the_names(tmp_path):
    assert on_this_disk(["s3://bucket/corpus"], tmp_path, copy=False) == (str(tmp_path / "bucket/corpus"),)
    assert contents(tmp_path) == {}


def test_only_what_changed_is_fetched_again_and_what_is_gone_goes(bucket, tmp_path):
    def copy():
        on_this_disk(["s3://bucket/corpus"], tmp_path, copy=True)
        files = sorted((tmp_path / "bucket/corpus").rglob("*.txt"))
        return {path.name: path.stat().st_ino for path in files}

    first = copy()
    assert copy() == first
    bucket.put_object(Bucket="bucket", Key="corpus/a.txt", Body=b"FIRST")  # of the same size: only its etag tells
    second = copy()
    assert second["b.txt"] == first["b.txt"]
    assert (tmp_path / "bucket/corpus/a.txt").read_bytes() == b"FIRST"
    (tmp_path / "bucket/corpus/a.txt").write_bytes(b"cut")
    bucket.delete_object(Bucket="bucket", Key="corpus/sub/b.txt")
    copy()
    assert contents(tmp_path) == {"bucket/corpus/a.txt": b"FIRST"}


def test_a_transfer_that_breaks_leaves_nothing_half(bucket, tmp_path, monkeypatch):
    class Broken:
        def __getattr__(self, name):
            return getattr(bucket, name)

        def download_file(self, _bucket, _key, path):
            with open(path, "w") as file:
                file.write("ha")
            raise OSError("connection reset")

    monkeypatch.setattr("mics.data.cache.s3", Broken)
    with pytest.raises(RunRefusedError, match=r"s3://bucket/corpus/a\.txt cannot be copied .*connection reset"):
        on_this_disk(["s3://bucket/corpus"], tmp_path, copy=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_is_not_there_is_refused_by_name(bucket, tmp_path):
    with pytest.raises(RunRefusedError, match=r"train\.data: s3://bucket/other is not there"):
        on_this_disk(["s3://bucket/other"], tmp_path, copy=True)
    with pytest.raises(RunRefusedError, match="NoSuchBucket"):
        on_this_disk(["s3://nowhere/other"], tmp_path, copy=True)


def test_a_disk_that_is_too_small_is_named_before_anything_is_fetched(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(RunRefusedError, match=r"needs 605 bytes .* 100 are free; name a larger disk in MICS_CACHE"):
        on_this_disk(["s3://bucket/corpus"], tmp_path, copy=True)
    assert contents(tmp_path) == {}


def test_the_cache_is_where_the_environment_says(tmp_path):
    assert cache_folder({"MICS_CACHE": str(tmp_path)}) == tmp_path
    assert cache_folder({}).name == "mics"
