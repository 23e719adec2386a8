"""What a disk may hold after the power fails: a recorder of changes below a folder, and its replay.

`Recorder` looks at the folder before every operation that an audit hook reports (open, rename,
remove, mkdir, rmdir, symlink) and at every `os.fsync`, and logs what has changed. `states` replays
the log up to each operation and yields every tree that the kernel may have left by then:

- A file has the content of its last fsync. What was written later, or never synced, may be lost:
  nothing of it is there, half of it, or all.
- A name (created, renamed, removed) is certain after an fsync of its directory. Before that, what
  happened in one directory arrives in its order, but directories are independent of each other.
- A rename is atomic, also from one directory to another, as in ext4, XFS and btrfs.

Not all combinations are built, but the extreme ones: all pending names, none, those of one
directory alone, those of all directories but one; each with every content that is not certain
absent, half there or whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.terminal import PACKAGE

Tree = dict[str, bytes | str | None]
"""Relative path -> content of a file, ("-> target") of a link, None of a folder."""
Content = Literal["lost", "half", "whole"]
CONTENTS: tuple[Content, ...] = ("lost", "half", "whole")

EVENTS = frozenset(
    {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link"}
)


@dataclass(frozen=True)
class Change:
    """One entry of the log."""

    kind: Literal["names", "data", "sync", "mark"]
    removed: tuple[tuple[int, str], ...] = ()
    """(directory, name)"""
    added: tuple[tuple[int, str, int], ...] = ()
    """(directory, name, inode); inodes by a number of our own: the system uses its own again"""
    inode: int | None = None
    content: bytes = b""
    site: str = ""
    """Of a sync: the functions of ours that asked for it; of a mark: its text."""

    @property
    def directories(self) -> set[int]:
        return {entry[0] for entry in (*self.removed, *self.added)}


class Recorder:
    """The changes below `root`, which must exist, while it is active."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Change] = []
        self._lock = threading.RLock()
        self._busy = False
        self._names: dict[tuple[int, str], int] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        self._numbers = {root.stat().st_ino: 0}  # the system's number -> ours
        self._next = 1
        self.folders = {0}
        self.links: dict[int, str] = {}
        self._look()
        self.begun = len(self.log)  # what was there before is on the disk

    def mark(self, text: str) -> None:
        """From here on, `text` is promised: a command would have said so."""
        with self._lock:
            self._look()
            self.log.append(Change("mark", site=text))

    def saw(self, inode: int, site: str) -> None:
        """An fsync of `inode`."""
        with self._lock:
            self._look(again=inode)
            self.log.append(Change("sync", inode=self._numbers.get(inode), site=site))

    def look(self) -> None:
        """Log what has changed; not while this thread is at it."""
        with self._lock:
            if not self._busy:
                self._look()

    def _look(self, again: int | None = None) -> None:
        self._busy = True
        try:
            names: dict[tuple[int, str], int] = {}
            numbers = {self.root.stat().st_ino: 0}
            self._walk(self.root, 0, names, numbers, again)
            removed = tuple(key for key, inode in self._names.items() if names.get(key) != inode)
            added = tuple(
                (*key, inode) for key, inode in names.items() if self._names.get(key) != inode
            )
            if removed or added:
                self.log.append(Change("names", removed, added))
            self._names, self._numbers = names, numbers
        finally:
            self._busy = False

    def _walk(
        self,
        folder: Path,
        parent: int,
        names: dict[tuple[int, str], int],
        numbers: dict[int, int],
        again: int | None,
    ) -> None:
        for entry in sorted(folder.iterdir()):
            found = entry.lstat()
            if found.st_ino not in self._numbers:
                self._numbers[found.st_ino] = self._next
                self._next += 1
            inode = numbers[found.st_ino] = self._numbers[found.st_ino]
            names[parent, entry.name] = inode
            if entry.is_symlink():
                self.links[inode] = str(entry.readlink())
            elif entry.is_dir():
                self.folders.add(inode)
                self._walk(entry, inode, names, numbers, again)
            else:
                stamp = (found.st_size, found.st_mtime_ns)
                if self._stamps.get(inode) != stamp or found.st_ino == again:
                    self._stamps[inode] = stamp
                    content = entry.read_bytes()
                    self.log.append(Change("data", inode=inode, content=content))


_active: list[Recorder] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or event not in EVENTS:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & 3):
        return  # for reading
    _active[-1].look()


_installed: list[bool] = []


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Log what happens below `root`; hooks cannot be removed, so that one is there for all."""
    if not _installed:
        sys.addaudithook(_hear)
        _installed.append(True)
    recorder, real = Recorder(root), os.fsync

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        recorder.saw(os.fstat(number).st_ino, _site())
        real(descriptor)

    _active.append(recorder)
    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield recorder
        recorder.mark("end")
    finally:
        os.fsync = real
        _active.remove(recorder)


def _site() -> str:
    """The innermost two functions of ours that are on the stack."""
    frame, names = sys._getframe(1), []
    while frame is not None and len(names) < 2:
        if frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)


# Replay.


def states(
    recorder: Recorder, *, without: str = "", contents: Collection[Content] = CONTENTS
) -> Iterator[tuple[Tree, list[str], str]]:
    """Every tree that may be found after a cut, what was promised by then, and a description.

    `without`: as if the fsyncs of this site were not there. A tree that was yielded with the same
    promises is not yielded again.
    """
    seen: set[Any] = set()
    for end in range(recorder.begun, len(recorder.log) + 1):
        log = [c for c in recorder.log[:end] if not (c.kind == "sync" and c.site == without)]
        begun = recorder.begun
        marks = [change.site for change in log if change.kind == "mark"]
        for policy, kept in _kept(log, begun):
            for content in contents:
                tree = _tree(recorder, log, begun, kept, content)
                key = (frozenset(tree.items()), len(marks))
                if key in seen:
                    continue
                seen.add(key)
                yield tree, marks, f"cut after change {end}, names: {policy}, data: {content}"


def _kept(log: list[Change], begun: int) -> Iterator[tuple[str, set[int]]]:
    """Sets of changes of names that may have arrived, by their numbers in the log."""
    certain, pending = set(), {}
    for number, change in enumerate(log):
        if change.kind == "names":
            if number < begun:
                certain.add(number)
            else:
                pending[number] = change.directories
        elif change.kind == "sync" and change.inode is not None:
            arrived = [n for n, places in pending.items() if change.inode in places]
            for n in _with_earlier(arrived, pending):
                certain.add(n)
                del pending[n]
    yield "none that is pending", certain
    yield "all", certain | pending.keys()
    for place in sorted({place for places in pending.values() for place in places}):
        own = [n for n, places in pending.items() if place in places]
        yield f"of directory {place} alone", certain | _with_earlier(own, pending)
        others: set[int] = set()
        held = {place}  # its changes are not there, nor what came after them in other places
        for n, places in pending.items():
            if places & held:
                held |= places
            else:
                others.add(n)
        yield f"all but of directory {place}", certain | others


def _with_earlier(numbers: Iterable[int], pending: dict[int, set[int]]) -> set[int]:
    """These, and all that came before them in the same directories."""
    wanted: set[int] = set()
    limits: dict[int, int] = {}
    for n in sorted(pending, reverse=True):
        if n in numbers or any(limits.get(place, -1) > n for place in pending[n]):
            wanted.add(n)
            for place in pending[n]:
                limits[place] = max(limits.get(place, -1), n)
    return wanted


def _tree(
    recorder: Recorder, log: list[Change], begun: int, kept: set[int], content: Content
) -> Tree:
    names: dict[int, dict[str, int]] = {}
    written: dict[int, bytes] = {}
    synced: dict[int, bytes] = {}
    for number, change in enumerate(log):
        if change.kind == "names":
            if number in kept:
                for place, name in change.removed:
                    names.get(place, {}).pop(name, None)
                for place, name, inode in change.added:
                    names.setdefault(place, {})[name] = inode
        elif change.kind == "data" and change.inode is not None:
            written[change.inode] = change.content
            if number < begun:
                synced[change.inode] = change.content
        elif change.inode in written:  # a sync
            synced[change.inode] = written[change.inode]

    def of_file(inode: int) -> bytes:
        new, old = written.get(inode, b""), synced.get(inode, b"")
        if new == old or content == "lost":
            return old
        return new if content == "whole" else new[: (len(new) + 1) // 2]

    tree: Tree = {}

    def fill(inode: int, prefix: str) -> None:
        for name, child in names.get(inode, {}).items():
            if child in recorder.links:
                tree[prefix + name] = "-> " + recorder.links[child]
            elif child in recorder.folders:
                tree[prefix + name] = None
                fill(child, f"{prefix}{name}/")
            else:
                tree[prefix + name] = of_file(child)

    fill(0, "")
    return tree


def build(tree: Tree, folder: Path) -> None:
    """Write a tree of `states` into an empty folder."""
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.symlink_to(content.removeprefix("-> "))
        else:
            path.write_bytes(content)


def replay(
    recorder: Recorder,
    folder: Path,
    check: Callable[[Path, list[str]], None],
    *,
    without: str = "",
) -> tuple[int, str]:
    """Check every state; how many there were, and the first that failed ("" if none did)."""
    folder.mkdir(exist_ok=True)
    count = 0
    for tree, marks, text in states(recorder, without=without):
        count += 1
        place = folder / "state"
        place.mkdir()
        build(tree, place)
        try:
            check(place, marks)
        except Exception as error:
            return count, f"{text}: {type(error).__name__}: {error} {sorted(tree)}"
        finally:
            shutil.rmtree(place)
    return count, ""


def sites(recorder: Recorder) -> list[str]:
    """Where the fsyncs of the log were asked for."""
    return sorted({c.site for c in recorder.log[recorder.begun :] if c.kind == "sync"})
