"""The emulated S3: moto's, with the objects on disk instead of in memory.

moto reads an object whole for every range of it, and joins the parts of an upload in memory. Here an object is a
`Content`; uploads, ranges and joins of any size take the memory of one block.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from micsctl.sandbox.application import MAX_BODY_BYTES, StartResponse, Wsgi, answer_error
from micsctl.sandbox.auth import is_body_hash
from micsctl.sandbox.contents import BLOCK_BYTES, Content, joined, store
from micsctl.sandbox.ec2.moto_parts import s3_exceptions, s3_models, s3_responses, werkzeug_app

_IN_MEMORY_BYTES = 64 << 10  # smaller bodies and objects stay in memory
_MAX_OBJECT_BYTES = 5 << 30  # of one PUT, as on AWS
_CONTENT = "micsctl.content"  # WSGI variable: the body, where it is on disk already

if TYPE_CHECKING:
    MotoKey = Any
    MotoUpload = Any
    MotoS3Response = Any
else:
    MotoKey, MotoUpload, MotoS3Response = s3_models.FakeKey, s3_models.FakeMultipart, s3_responses.S3Response
_compute_checksum = s3_responses.compute_checksum


class SandboxKey(MotoKey):  # type: ignore[misc]
    """An object or a part of an upload."""

    folder: Path  # set by install

    def __new__(cls, *_: Any, **__: Any) -> SandboxKey:
        return object.__new__(cls)  # moto's keeps every object that there ever was

    @property
    def value(self) -> bytes | Content:
        return self._content

    @value.setter
    def value(self, new: bytes | Content) -> None:
        if isinstance(new, bytes) and len(new) > _IN_MEMORY_BYTES:
            new = store(self.folder, [new])
        self._content = new
        self.contentsize = len(new)

    @property
    def content(self) -> Content:
        return self._content if isinstance(self._content, Content) else store(self.folder, [self._content])

    @property
    def etag(self) -> str:
        return f'"{self._etag or _md5(self._content)}"'

    def dispose(self, garbage: bool = False) -> None:
        self._content = b""
        if not garbage and self.multipart:
            self.multipart.dispose()


def _md5(content: bytes | Content) -> str:
    return content.md5 if isinstance(content, Content) else hashlib.md5(content, usedforsecurity=False).hexdigest()


class SandboxUpload(MotoUpload):  # type: ignore[misc]
    """A multipart upload."""

    def __new__(cls, *_: Any, **__: Any) -> SandboxUpload:
        return object.__new__(cls)

    def complete(self, body: Iterator[tuple[int, str]]) -> tuple[Content, str, None]:
        """The object, its ETag, and no checksum: AWS would keep one of the parts' checksums."""
        chosen = [(self.parts.get(number), etag.replace('"', "")) for number, etag in body]
        if not chosen:
            raise s3_exceptions.MalformedXML
        if any(part is None or part.etag.replace('"', "") != etag for part, etag in chosen):
            raise s3_exceptions.InvalidPart
        parts = [part for part, _ in chosen if part]
        if any(part.contentsize < s3_models.S3_UPLOAD_PART_MIN_SIZE for part in parts[:-1]):
            raise s3_exceptions.EntityTooSmall
        digests = b"".join(bytes.fromhex(etag) for _, etag in chosen)
        etag = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
        return joined(part.content for part in parts), etag, None


class SandboxS3Response(MotoS3Response):  # type: ignore[misc]
    """One request of S3."""

    def setup_class(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().setup_class(request, *args, **kwargs)
        if _CONTENT in request.environ:
            self.body = request.environ[_CONTENT]


class ObjectStore:
    """The WSGI application of S3 alone, for requests whose signature is right and whose body is not read yet."""

    def __init__(self, moto: Wsgi, folder: Path) -> None:
        self._moto, self._folder = moto, folder
        self._lock = threading.Lock()  # moto is not made for threads

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        writes = environ["REQUEST_METHOD"] in ("PUT", "POST")
        if writes and "CONTENT_LENGTH" not in environ:
            return answer_error(environ, start_response, "411 Length Required", "MissingContentLength", "")
        # a body in pieces, each with its signature, is taken apart by moto; documents (POST) are small
        on_disk = environ["REQUEST_METHOD"] == "PUT" and "HTTP_X_AMZ_DECODED_CONTENT_LENGTH" not in environ
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length > (_MAX_OBJECT_BYTES if on_disk else MAX_BODY_BYTES):
            return answer_error(environ, start_response, "400 Bad Request", "EntityTooLarge", f"{length} bytes")
        body = _Body(environ["wsgi.input"], length)
        if on_disk and length > _IN_MEMORY_BYTES:
            content = store(self._folder, body)
            content.md5  # noqa: B018  (it will be asked for; now nobody waits for the lock)
            environ |= {_CONTENT: content, "wsgi.input": io.BytesIO(), "CONTENT_LENGTH": "0"}
        else:
            environ["wsgi.input"] = io.BytesIO(b"".join(body))
        if body.missing_bytes:
            return answer_error(environ, start_response, "400 Bad Request", "IncompleteBody", "the client broke off")
        if not is_body_hash(environ["HTTP_X_AMZ_CONTENT_SHA256"], body.hash.hexdigest()):
            code, why = "XAmzContentSHA256Mismatch", "the body is not the one that was signed"
            return answer_error(environ, start_response, "400 Bad Request", code, why)
        try:
            with self._lock:  # what an answer streams afterwards never changes
                return self._moto(environ, start_response)
        finally:
            # Flask's request and `environ` hold each other: the file would stay until some garbage collection
            environ.pop(_CONTENT, None)


class _Body:
    """Blocks of a request's body, hashed on the way."""

    def __init__(self, stream: Any, length: int) -> None:
        self._stream, self.missing_bytes, self.hash = stream, length, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        while block := self._stream.read(min(self.missing_bytes, BLOCK_BYTES)):
            self.missing_bytes -= len(block)
            self.hash.update(block)
            yield block


def install(folder: Path) -> ObjectStore:
    """Put the classes above in moto's places, before the first request. `folder` is where the objects lie.

    Raises RuntimeError where moto is not the moto that this was written for.
    """
    _check_touch_points()
    SandboxKey.folder = folder
    s3_models.FakeKey, s3_models.FakeMultipart = SandboxKey, SandboxUpload
    s3_responses.FakeKey, s3_responses.S3Response = SandboxKey, SandboxS3Response  # S3's URLs are imported anew
    s3_responses.compute_checksum = lambda body, *args, **kwargs: _compute_checksum(bytes(body), *args, **kwargs)
    application = werkzeug_app.create_backend_app("s3")
    if any(view.callback.__self__ is not SandboxS3Response for view in application.view_functions.values()):
        raise RuntimeError("this moto is not the one that the sandbox was written for: moto.s3.urls")
    return ObjectStore(application, folder)


def _check_touch_points() -> None:
    key, upload = s3_models.FakeKey, s3_models.FakeMultipart
    places = {
        "FakeKey.value": isinstance(getattr(key, "value", None), property),
        "FakeKey.etag": isinstance(getattr(key, "etag", None), property),
        "FakeKey.multipart": "multipart" in key.__init__.__code__.co_varnames,
        "FakeMultipart.complete": hasattr(upload, "complete"),
        "FakeMultipart.parts": "parts" in upload.__init__.__code__.co_names,
        "S3Response.setup_class": hasattr(s3_responses.S3Response, "setup_class"),
        "moto.s3.responses.compute_checksum": hasattr(s3_responses, "compute_checksum"),
    }
    if missing := [name for name, there in places.items() if not there]:
        raise RuntimeError(f"this moto is not the one that the sandbox was written for: {', '.join(missing)}")
