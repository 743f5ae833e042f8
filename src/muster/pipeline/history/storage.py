"""Where the history is stored: a local folder or an object store, named by a path or a URL.

    /var/lib/muster/history, file:///var/lib/muster/history     a folder of this machine
    s3://BUCKET/PATH, s3a://BUCKET/PATH                          S3 and compatible stores
    gs://BUCKET/PATH                                             Google Cloud Storage
    abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH          Azure Data Lake Storage

Credentials and endpoints of object stores come from the environment (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_KEY``, …); they are never
part of a URL.  For S3, the identity of the machine (its metadata address) is used only on request, with
``AWS_EC2_METADATA_DISABLED=false``.  Spark's checkpoint can also be in ``hdfs://``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import parse

from muster.core import errors, files

#: A path or a URL. A URL stays text: `pathlib` would remove one of its slashes.
Root = str | os.PathLike[str]

OBJECT_STORES = ("s3", "s3a", "gs", "abfss")
CHECKPOINT_ONLY = ("hdfs",)
#: Variables of the environment that executors on other machines need as well.
ENVIRONMENT = ("AWS_", "AZURE_", "GOOGLE_")

# Of the AWS libraries. delta-rs ignores it if an endpoint is configured, and has its own variable then.
_NO_METADATA, _METADATA_ADDRESS = "AWS_EC2_METADATA_DISABLED", "AWS_METADATA_ENDPOINT"
_UNREACHABLE = "http://127.0.0.1:1"

CHECK_PREFIX = ".muster-check-"  # of files that show for a moment that a folder is writable

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_REFUSED = frozenset("%*?[]{}\\")
_MISSING = re.compile(r"No such file or directory|Object at location \S+ not found")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class HistoryFull(errors.LimitExceeded):
    """There is no disk space for the history. The pipeline continues without it, and counts."""

    code = "history-full"


class StorageUnavailable(errors.Unavailable):
    """The storage refuses access or does not respond."""

    code = "storage-unavailable"


class FilesRemoved(errors.Conflict):
    """Files of a snapshot are not there any more: it is too old, or they were replaced while it was read."""

    code = "files-removed"


class ConcurrentChange(errors.Conflict):
    """Another process changed the table at the same time."""

    code = "concurrent-change"


def normalize(root: Root, *, setting: str = "history_dir", checkpoint: bool = False) -> str:
    """A local path without a scheme, or a URL. `errors.InvalidInput` if it is neither."""
    text = os.fspath(root)
    scheme = scheme_of(text)
    characters = set(text if scheme != "file" else parse.unquote(text))
    if any(character < " " or character == "\x7f" for character in characters):
        raise errors.InvalidInput(f"{setting}: {_without_secrets(text)!r} contains a control character")
    if special := sorted(characters & _REFUSED):
        raise errors.InvalidInput(
            f"{setting}: {_without_secrets(text)!r} contains {' '.join(special)}",
            hint="Spark and delta-rs do not agree on names with these characters",
        )
    if not scheme:
        return str(files.expanded(text).absolute())
    parts = parse.urlsplit(text)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise errors.InvalidInput(
                f"{setting}: {text!r} is not a file URL", hint="write file:///path/of/folder"
            )
        return parse.unquote(parts.path)
    allowed = (*OBJECT_STORES, *(CHECKPOINT_ONLY if checkpoint else ()))
    if scheme not in allowed:
        raise errors.InvalidInput(
            f"{setting}: {scheme!r} is not a supported kind of storage",
            hint=f"use a path, file://, {', '.join(f'{name}://' for name in allowed)}",
        )
    if not text.startswith(f"{text[: len(scheme)]}://") or not parts.netloc or parts.query or parts.fragment:
        raise errors.InvalidInput(
            f"{setting}: {_without_secrets(text)!r} names no bucket",
            hint=f"write {scheme}://BUCKET/PATH",
        )
    if parts.password is not None or (parts.username is not None and scheme != "abfss"):
        raise errors.InvalidInput(
            f"{setting}: a URL must not contain credentials", hint="set them in the environment"
        )
    if scheme == "abfss" and not (parts.username and parts.hostname):
        raise errors.InvalidInput(
            f"{setting}: {text!r} names no container",
            hint="write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
        )
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def scheme_of(text: str) -> str:
    """The scheme of a URL in lower case; empty for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def is_local(root: Root) -> bool:
    return scheme_of(os.fspath(root)) in ("", "file")


def local_path(root: Root) -> Path | None:
    """The folder; None if the storage is not local."""
    return Path(normalize(root)) if is_local(root) else None


def join(root: Root, *names: str) -> str:
    return "/".join((normalize(root, checkpoint=True), *names))


def delta_url(root: Root, *names: str) -> str:
    """The same storage, as delta-rs spells it."""
    url = re.sub(r"\As3a:", "s3:", join(root, *names))
    if scheme_of(url) == "s3":
        _disable_metadata()
    return url


def spark_url(root: Root, *names: str) -> str:
    """The same storage, as Hadoop's file systems spell it."""
    url = re.sub(r"\As3:", "s3a:", join(root, *names))
    if scheme_of(url) == "s3a":
        _disable_metadata()
    return url if scheme_of(url) else f"file://{url}"  # not escaped: Hadoop takes %20 literally


def _disable_metadata() -> None:
    """Request no credentials from the metadata address of the machine, unless the environment allows it."""
    if os.environ.setdefault(_NO_METADATA, "true").lower() == "true":
        os.environ.setdefault(_METADATA_ADDRESS, _UNREACHABLE)


def filesystem(root: Root, *names: str) -> Any:
    """A pyarrow file system whose paths are relative to the storage."""
    from pyarrow import fs

    url = delta_url(root, *names)
    if is_local(url):
        return fs.SubTreeFileSystem(url, fs.LocalFileSystem())
    if scheme_of(url) in CHECKPOINT_ONLY:
        store, path = fs.FileSystem.from_uri(url)  # needs Hadoop's native library
        return fs.SubTreeFileSystem(path, store)
    from deltalake.fs import DeltaStorageHandler

    return fs.PyFileSystem(DeltaStorageHandler(url))


def write_file(root: Root, path: str, write: Any) -> int:
    """Call ``write`` with an open file for ``path`` below the storage. The size of the file.

    A local file is synced before this returns.  A file that could not be written completely is removed.
    """
    folder = local_path(root)
    with translated(f"{join(root)}/{path}"):
        if folder is None:
            return _write_object(root, path, write)
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with target.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            files.sync_folder(target.parent)
            return target.stat().st_size
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _write_object(root: Root, path: str, write: Any) -> int:
    """Upload an object whose content is made in memory: it appears when it is complete."""
    content = io.BytesIO()
    write(content)
    data = content.getvalue()
    url = delta_url(root)
    if scheme_of(url) in CHECKPOINT_ONLY:
        with filesystem(root).open_output_stream(path) as stream:
            stream.write(data)
        return len(data)
    from deltalake._internal import DeltaFileSystemHandler

    # Not through pyarrow: its streams pass buffers, and delta-rs accepts only bytes.
    target = DeltaFileSystemHandler(url).open_output_stream(path)
    target.write(data)
    target.close()  # type: ignore[attr-defined] # missing in its stub
    return len(data)


def replace_file(root: Root, path: str, data: bytes) -> None:
    """Write a small file atomically."""
    folder = local_path(root)
    with translated(f"{join(root)}/{path}"):
        if folder is None:
            _write_object(root, path, lambda file: file.write(data))
            return
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / path, data)


def read_file(store: Any, path: str) -> bytes | None:
    """The content of a small file; None if it does not exist."""
    try:
        with store.open_input_stream(path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        return None


def names(store: Any, folder: str) -> list[str]:
    """The names in a folder; none if it does not exist."""
    from pyarrow import fs

    listed = store.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return [info.base_name for info in listed]


def check(root: Root, *, setting: str = "history_dir", checkpoint: bool = False) -> None:
    """Raise an error unless files can be written here. A full disk is accepted: it may have space later."""
    url = normalize(root, setting=setting, checkpoint=checkpoint)
    name = f"{CHECK_PREFIX}{uuid.uuid4().hex[:8]}"
    try:
        write_file(url, name, lambda file: file.write(b"muster"))
        filesystem(url).delete_file(name)
    except HistoryFull:
        pass
    except (errors.MusterError, OSError) as error:
        hint = "check the bucket, and credentials and endpoint in the environment"
        if is_local(url):
            hint = "the folder must be writable"
        elif scheme_of(url) in CHECKPOINT_ONLY:
            hint = "HDFS needs Hadoop's client: set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        raise errors.InvalidInput(
            f"{setting}: {url} cannot be used: {_first_line(error)}", hint=hint
        ) from error


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of the storage and of delta-rs become Muster's."""
    from deltalake import exceptions

    try:
        yield
    except exceptions.TableNotFoundError as error:
        raise errors.NotFound(f"there is no table in {what}") from error
    except exceptions.CommitFailedError as error:
        raise ConcurrentChange(f"{what}: {_first_line(error)}") from error
    except BaseException as error:
        if not isinstance(error, OSError | exceptions.DeltaError) and not _is_panic(error):
            raise
        if is_missing(error):
            raise files_removed() from error
        full = getattr(error, "errno", None) in _FULL or "No space left" in str(error)
        if full:
            raise HistoryFull(f"no disk space for the history in {what}: {_first_line(error)}") from error
        raise StorageUnavailable(f"{what}: {_first_line(error)}") from error


def files_removed() -> FilesRemoved:
    return FilesRemoved(
        "files of the history were removed",
        hint="read again; --as-of reaches back as far as pipeline.as_of_s, and not beyond a --purge",
    )


def is_missing(error: BaseException) -> bool:
    """Whether a file or object does not exist. Errors of object stores, and through DuckDB, are only text."""
    return isinstance(error, FileNotFoundError) or _MISSING.search(str(error)) is not None


def _is_panic(error: BaseException) -> bool:
    """Whether delta-rs failed in Rust, as for an endpoint that is no URL: its exception is not importable."""
    return type(error).__name__ == "PanicException"


def _first_line(error: BaseException) -> str:
    """Errors of object stores have many lines with terminal colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return " ".join(line.strip() for line in text.splitlines()[:6])[:400]


def _without_secrets(text: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", text)
