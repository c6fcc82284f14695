"""A folder and an S3 prefix behave alike; S3 is moto's server in this process."""

import contextlib
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mics.checkpoint.files import StoreFiles, crc32_of
from mics.checkpoint.marks import MARK, FileSum, Identity, Mark, Progress
from mics.checkpoint.stores import DiskStore, S3Store, open_store
from mics.checkpoint.writing import remove_old
from mics.errors import RunRefusedError
from mics.storage import RangeReader, open_s3, s3, split_url

CONTENT = bytes(range(256)) * 40


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path):
    return f"s3://{request.getfixturevalue('bucket')}/runs" if request.param == "s3" else str(tmp_path / "runs")


def test_files_come_and_go_and_neighbours_are_left_alone(root):
    store, neighbour = open_store(f"{root}/a/"), open_store(f"{root}/ab")
    assert (store.folders(), store.sizes_bytes("step-1")) == ([], {})
    for each in (store, neighbour):
        for folder in ("step-1", "step-10"):
            each.make_folder(folder)
            each.write(f"{folder}/data", CONTENT)
            each.write(f"{folder}/{MARK}", b"{}")
    assert store.folders() == ["step-1", "step-10"]
    assert store.sizes_bytes("step-1") == {"data": len(CONTENT), MARK: 2}
    assert store.read("step-1/data") == CONTENT
    assert store.exists("step-1/data")
    assert not store.exists("step-1/dat")
    store.rename("step-1/data", "step-1/moved")
    assert store.sizes_bytes("step-1") == {"moved": len(CONTENT), MARK: 2}
    store.remove_folder("step-1")
    assert store.folders() == ["step-10"]
    store.remove_folder("step-10")
    assert neighbour.folders() == ["step-1", "step-10"]
    assert neighbour.sizes_bytes("step-1") == {"data": len(CONTENT), MARK: 2}


def test_a_removal_that_is_interrupted_leaves_no_mark(root, monkeypatch):
    store = open_store(root)
    store.make_folder("step-1")
    for name in ("data", MARK):
        store.write(f"step-1/{name}", CONTENT)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mics.checkpoint.stores.shutil.rmtree", interrupted)
    monkeypatch.setattr("mics.checkpoint.stores._batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.remove_folder("step-1")
    assert list(store.sizes_bytes("step-1")) == ["data"]


def test_sums_are_of_what_was_written_even_where_the_store_lost_it(root):
    store = open_store(root)
    files = StoreFiles(store)
    store.make_folder("step-1")
    with files.create_stream("step-1/.metadata.tmp", "wb") as stream:
        for start in range(0, len(CONTENT), 1000):
            assert stream.tell() == start
            stream.write(CONTENT[start : start + 1000])
    files.rename("step-1/.metadata.tmp", "step-1/.metadata")
    assert files.sums == {".metadata": FileSum(len(CONTENT), crc32_of(store, "step-1/.metadata"))}
    store.write("step-1/.metadata", CONTENT[:-1] + b"x")
    assert files.sums[".metadata"].crc32 != crc32_of(store, "step-1/.metadata")


def test_a_stream_that_breaks_leaves_no_object_and_no_upload(bucket):
    store = S3Store(f"s3://{bucket}/runs", s3())
    stream = store.stream("step-1/data", "wb")
    with pytest.raises(TypeError), stream as opened:
        opened.write("no bytes")
    assert store.sizes_bytes("step-1") == {}
    assert "Uploads" not in s3().list_multipart_uploads(Bucket=bucket)


def test_uploads_of_dead_writers_are_aborted_and_those_of_other_runs_are_not(bucket):
    client = s3()
    for key in ("runs/a/step-1/data", "runs/ab/step-1/data"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    S3Store(f"s3://{bucket}/runs/a", client).drop_unfinished()
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["runs/ab/step-1/data"]


@settings(max_examples=15, deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, 11000), st.integers(0, 5000)), max_size=4))
def test_ranges_are_what_a_file_would_give(shared_object, reads):
    client, url = shared_object
    plain = io.BytesIO(CONTENT)
    with RangeReader(client, url) as ours:
        for start, count in reads:
            assert ours.seek(start) == plain.seek(start)
            assert ours.read(count) == plain.read(count)


@pytest.fixture(scope="module")
def shared_object(s3_server):
    client = s3_server
    client.create_bucket(Bucket="ranges")
    client.put_object(Bucket="ranges", Key="data", Body=CONTENT)
    return client, "s3://ranges/data"


def test_a_part_is_read_without_the_rest(bucket):
    client = s3()
    client.put_object(Bucket=bucket, Key="large", Body=bytes(40 << 20))
    ranges = []
    client.meta.events.register(
        "provide-client-params.s3.GetObject", lambda params, **_: ranges.append(params["Range"])
    )
    with open_s3(client, f"s3://{bucket}/large", "rb") as stream:
        stream.seek(30 << 20)
        assert len(stream.read(1000)) == 1000
        stream.seek((30 << 20) + 5000)
        stream.read(1000)
    assert ranges == [f"bytes={30 << 20}-{(38 << 20) - 1}"]


@pytest.mark.parametrize("url", ["/fsx/a", "s3://", "s3:///key", "http://bucket/key"])
def test_other_names_are_no_s3_names(url):
    with pytest.raises(RunRefusedError, match="write s3://bucket/name"):
        split_url(url)


def test_s3_names():
    assert split_url("s3://bucket/a/b") == ("bucket", "a/b")
    assert split_url("s3://bucket") == ("bucket", "")


def test_a_bucket_that_is_not_there_is_refused_in_one_line(bucket):
    store = open_store("s3://no-such-bucket/runs")
    for action in (store.folders, lambda: store.write("a", b"b"), lambda: store.read("a")):
        with pytest.raises(RunRefusedError, match=r"s3://no-such-bucket/runs.*: S3 refused .*") as refused:
            action()
        assert "\n" not in str(refused.value)
    with pytest.raises(RunRefusedError, match="no-such-bucket"), store.stream("a", "wb") as stream:
        stream.write(b"b")


def test_missing_credentials_are_refused_in_one_line(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(RunRefusedError, match="Unable to locate credentials"):
        open_store(f"s3://{bucket}/runs").folders()


def test_a_missing_boto3_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "smart_open", None)
    with pytest.raises(RunRefusedError, match="s3:// needs boto3 and smart_open on every node"):
        open_store("s3://bucket/runs")


def test_a_folder_that_may_not_be_written_says_which(tmp_path):
    store = DiskStore(str(tmp_path))
    with pytest.raises(OSError, match="nowhere"):
        store.write("nowhere/file", b"")


def whole(store, name):
    store.make_folder(name)
    store.write(f"{name}/data", CONTENT)
    mark = Mark(Progress(1, 1), Identity({}, {}), {"data": FileSum(len(CONTENT), "0")})
    store.write(f"{name}/{MARK}", mark.to_json().encode())


def test_a_new_checkpoint_stays_though_later_ones_lie_there(root):
    store = open_store(root)
    for name in ("step-5", "step-10", "step-10.2", "step-11", "step-20", "step-30", "other"):
        whole(store, name)
    store.write("step-5/data", b"short")
    assert remove_old(store, "step-11", keep=2, keep_every=0) == ["step-10"]  # the first attempt
    assert remove_old(store, "step-11", keep=1, keep_every=0) == ["step-10.2"]
    assert remove_old(store, "step-11", keep=0, keep_every=0) == []
    assert store.folders() == ["other", "step-11", "step-20", "step-30", "step-5"]


class SlowMetadata(BaseHTTPRequestHandler):
    """An instance metadata service (version 2 alone) that takes longer than botocore waits by itself."""

    def do_PUT(self):
        time.sleep(1.5)
        self.answer("token")

    def do_GET(self):
        keys = {"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "a", "SecretAccessKey": "s", "Token": "t"}
        times = {"LastUpdated": "2030-01-01T00:00:00Z", "Expiration": "2099-01-01T00:00:00Z"}
        code = 200 if "X-aws-ec2-metadata-token" in self.headers else 401
        self.answer(json.dumps({**keys, **times}) if self.path.endswith("/nodes") else "nodes", code)

    def answer(self, text, code=200):
        self.send_response(code)
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked may have gone
            self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def test_a_slow_metadata_service_is_waited_for(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowMetadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        credentials = s3()._request_signer._credentials
        assert credentials
        assert credentials.method == "iam-role"
    finally:
        server.shutdown()
        server.server_close()
