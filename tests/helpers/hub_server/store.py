"""Content of the mock Hub: files, commits and repositories."""
import hashlib
import json
import struct
from dataclasses import dataclass, field
from typing import Iterator, Optional

LARGE = (".safetensors", ".bin", ".pth", ".npz")  # such files are uploaded before the commit


@dataclass(frozen=True)
class File:
    """Description of a file in a commit. `HubServer.blobs` contains the content."""

    size: int
    sha256: str
    oid: str  # hash of the blob in git; a large file's blob is its LFS pointer
    large: bool
    xet: Optional[str] = None  # hf_xet's hash of the content

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: dict[str, File]


@dataclass
class Repository:
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)  # name -> commit
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]

    def find(self, revision: str) -> Optional[Commit]:
        """Return the commit of a branch, a tag, ``refs/pr/N`` or a commit hash."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(oid)

    def add(self, files: dict[str, File], title: str, branch: str) -> Commit:
        parent = self.branches.get(branch, "")
        described = json.dumps([parent, title, {path: file.oid for path, file in files.items()}], sort_keys=True)
        oid = hashlib.sha1(f"{self.id} {len(self.commits)} {described}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, title, files)
        self.branches[branch] = oid
        return self.commits[oid]


def describe(content: Optional[bytes], sha256: str, size: int, large: bool) -> File:
    """Return the description of a file's content. The content of a large file may be None."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    blob = pointer if large else content
    return File(size, sha256, hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest(), large)


def files_of_shard(shard: bytes) -> Iterator[tuple[str, str]]:
    """Yield (SHA-256, xet hash) of each file in a xet shard.

    A shard consists of a header of 48 bytes and records of 48 bytes. The first record of a file contains the xet hash,
    flags and the number of segments. One record per segment follows. If bit 31 of the flags is set, one verification
    record per segment comes next. If bit 30 is set, one more record follows, which begins with the SHA-256. A hash
    whose bits are all 1 ends the list of files.
    """
    size, at = 48, 48
    while shard[at:at + 32] != b"\xff" * 32:
        flags, segments = struct.unpack_from("<II", shard, at + 32)
        end = at + size * (1 + segments * (2 if flags >> 31 else 1))
        if flags >> 30 & 1:
            yield _hash(shard[end:end + 32]), _hash(shard[at:at + 32])
            end += size
        at = end


def _hash(stored: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", stored))
