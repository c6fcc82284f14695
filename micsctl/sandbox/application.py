"""The sandbox's endpoint: checks who asks, answers control paths, hands the rest to the emulated AWS.

The sandbox's own key may do everything. The credentials of an instance role may use S3, and nothing else.
"""

from __future__ import annotations

import io
import json
import threading
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any
from xml.sax.saxutils import escape

from micsctl.sandbox.auth import Key, Refusal, Request, refusal, service_of
from micsctl.sandbox.faults import Fault, FaultBook
from micsctl.sandbox.roles import RoleKeys

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Wsgi = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]
_CONTROL = "/_sandbox/"
MAX_BODY_BYTES = 64 << 20  # of what is read into memory


class Application:
    """The WSGI application.

    inner    everything but S3; called one request at a time, with the body in memory
    objects  S3; called with the body unread, which it must compare with X-Amz-Content-SHA256
    """

    def __init__(
        self,
        key: Key,
        roles: RoleKeys,
        faults: FaultBook,
        inner: Wsgi,
        objects: Wsgi,
        lock: threading.RLock,
        about: Callable[[], Any],
    ) -> None:
        self._key, self._roles, self._faults = key, roles, faults
        self._inner, self._objects, self._lock, self._about = inner, objects, lock, about

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        request = _request(environ)
        try:
            if service_of(request) == "s3":
                return self._s3(request, environ, start_response)
            return self._other(request, environ, start_response)
        except Exception as error:  # noqa: BLE001  (a fault of the emulator: logged, and said so that botocore reads it)
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}; the sandbox's server.log has more"
            return answer_error(environ, start_response, "500 Internal Server Error", "InternalError", message)

    def _s3(self, request: Request, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if why := self._refusal(request):
            return _refuse(environ, start_response, why)
        return self._objects(environ, start_response)

    def _other(self, request: Request, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length > MAX_BODY_BYTES:
            return _answer(start_response, "413 Content Too Large", b"")
        body = environ["wsgi.input"].read(length)
        if why := self._refusal(Request(request.method, request.path, request.query, request.headers, body)):
            return _refuse(environ, start_response, why)
        if "x-amz-security-token" in request.headers:
            return _deny(environ, start_response)
        if environ["PATH_INFO"].startswith(_CONTROL):
            path = environ["PATH_INFO"].removeprefix(_CONTROL)
            return self._control(path, environ["REQUEST_METHOD"], body, start_response)
        environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            return list(self._inner(environ, start_response))

    def _refusal(self, request: Request) -> Refusal | None:
        """None where the sandbox's key signed it, or credentials of an instance that have not ended."""
        now = datetime.now(UTC)
        token = request.headers.get("x-amz-security-token")
        if token is None:
            return refusal(request, self._key, now)
        credentials = self._roles.find(token)
        if credentials is None:
            return Refusal("InvalidToken", "the session token is not one of this sandbox")
        if credentials.ends_at <= now:
            return Refusal("ExpiredToken", f"the credentials ended at {credentials.ends_at:%Y-%m-%dT%H:%M:%SZ}")
        return refusal(request, credentials.key, now)

    def _control(self, path: str, method: str, body: bytes, start_response: StartResponse) -> Iterable[bytes]:
        match method, path:
            case "GET", "about":
                return _answer(start_response, "200 OK", json.dumps(self._about()).encode())
            case "GET", "faults":
                return _answer(start_response, "200 OK", json.dumps([f.as_json() for f in self._faults.all()]).encode())
            case "POST", "faults":
                try:
                    self._faults.add(Fault.from_json(json.loads(body)))
                except (ValueError, TypeError) as error:
                    return _answer(start_response, "400 Bad Request", json.dumps(str(error)).encode())
                return _answer(start_response, "200 OK", b"{}")
            case "DELETE", "faults":
                self._faults.clear()
                return _answer(start_response, "200 OK", b"{}")
        return _answer(start_response, "404 Not Found", b"{}")


def _request(environ: dict[str, Any]) -> Request:
    headers = {name[5:].replace("_", "-").lower(): str(value) for name, value in environ.items() if name[:5] == "HTTP_"}
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers[name.replace("_", "-").lower()] = str(environ[name])
    raw = str(environ.get("REQUEST_URI") or environ["PATH_INFO"])
    path, _, query = raw.partition("?")
    return Request(str(environ["REQUEST_METHOD"]), path, query, headers, body=None)


def _answer(start_response: StartResponse, status: str, body: bytes, kind: str = "application/json") -> Iterable[bytes]:
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def _refuse(environ: dict[str, Any], start_response: StartResponse, why: Refusal) -> Iterable[bytes]:
    """S3, JSON services and the others have codes of their own for it."""
    message = f"AWS was not able to validate the provided access credentials: {why.why}"
    if _is_s3(environ):
        bad_request = why.code in ("InvalidToken", "ExpiredToken", "InvalidRequest", "XAmzContentSHA256Mismatch")
        status = "400 Bad Request" if bad_request else "403 Forbidden"
        return answer_error(environ, start_response, status, why.code, why.why)
    if "HTTP_X_AMZ_TARGET" in environ:
        return answer_error(environ, start_response, "400 Bad Request", "UnrecognizedClientException", message)
    return answer_error(environ, start_response, "401 Unauthorized", "AuthFailure", message)


def _deny(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    message = "You are not authorized to perform this operation: a role of the sandbox may use S3 only."
    if "HTTP_X_AMZ_TARGET" in environ:
        return answer_error(environ, start_response, "400 Bad Request", "AccessDeniedException", message)
    code = "UnauthorizedOperation" if _is_ec2(environ) else "AccessDenied"
    return answer_error(environ, start_response, "403 Forbidden", code, message)


def _is_s3(environ: dict[str, Any]) -> bool:
    return "/s3/aws4_request" in environ.get("HTTP_AUTHORIZATION", "")


def _is_ec2(environ: dict[str, Any]) -> bool:
    return "/ec2/aws4_request" in environ.get("HTTP_AUTHORIZATION", "")


def answer_error(
    environ: dict[str, Any], start_response: StartResponse, status: str, code: str, message: str
) -> Iterable[bytes]:
    """In the form that botocore reads: JSON services by their header, EC2, S3 and the rest in XML."""
    if "HTTP_X_AMZ_TARGET" in environ:
        body = json.dumps({"__type": code, "message": message}).encode()
        return _answer(start_response, status, body, "application/x-amz-json-1.1")
    error = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    if _is_ec2(environ):
        error = f"<Response><Errors>{error}</Errors><RequestID>sandbox</RequestID></Response>"
    elif not _is_s3(environ):
        error = f"<ErrorResponse>{error}<RequestId>sandbox</RequestId></ErrorResponse>"
    return _answer(start_response, status, error.encode(), "text/xml")
