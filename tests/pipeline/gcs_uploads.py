"""A proxy that adds to an emulator of Google Cloud Storage what delta-rs needs: uploads of the XML API, and
lists that start after a name.

Run as ``python -m tests.pipeline.gcs_uploads PORT EMULATOR``.  All other requests are passed on.
"""

from __future__ import annotations

import html
import http.server
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid

UPLOADS: dict[str, dict[int, bytes]] = {}
PASSED_ON = ("content-type", "range")


class UploadProxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    emulator = ""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        upload = query.get("uploadId", "")
        if self.command == "POST" and "uploads" in query:
            upload = uuid.uuid4().hex
            UPLOADS[upload] = {}
            self._answer(200, _xml("InitiateMultipartUploadResult", "UploadId", upload))
        elif self.command == "PUT" and upload:
            UPLOADS[upload][int(query["partNumber"])] = body
            self._answer(200, b"", {"ETag": f'"{query["partNumber"]}"'})
        elif self.command == "POST" and upload:
            parts = UPLOADS.pop(upload)
            self._store(address.path, b"".join(parts[number] for number in sorted(parts)))
        elif self.command == "PUT":
            self._store(address.path, body)
        elif self.command == "DELETE" and upload:
            UPLOADS.pop(upload, None)
            self._answer(204, b"")
        else:
            status, content, headers = self._request(self.command, self.path, body)
            if "start-after" in query:
                content = _after(content, query["start-after"])
            self._answer(status, content, headers)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _store(self, path: str, body: bytes) -> None:
        _, bucket, name = path.split("/", 2)
        query = {"uploadType": "media", "name": urllib.parse.unquote(name)}
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            query["ifGenerationMatch"] = generation
        target = f"/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
        status, content, _ = self._request("POST", target, body)
        if status < 300 and self.command == "POST":
            content = _xml("CompleteMultipartUploadResult", "ETag", "stored")
        self._answer(status, content, {"ETag": '"stored"', "x-goog-generation": "1"})

    def _request(self, method: str, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
        request = urllib.request.Request(
            self.emulator + path, body if method == "POST" else None, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), dict(answer.headers.items())
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers.items())

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        length = (headers or {}).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


def _after(listed: bytes, name: str) -> bytes:
    """The list without the objects up to a name."""

    def entry(match: re.Match[str]) -> str:
        return match[0] if html.unescape(match[1]) > name else ""

    return re.sub(r"<Contents><Key>(.*?)</Key>.*?</Contents>", entry, listed.decode()).encode()


def _xml(outer: str, inner: str, text: str) -> bytes:
    return f"<{outer}><{inner}>{text}</{inner}></{outer}>".encode()


if __name__ == "__main__":
    UploadProxy.emulator = sys.argv[2]
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), UploadProxy).serve_forever()
