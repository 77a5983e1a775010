"""Which format a corpus has: by what it holds, and by its name where that does not tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from libra.corpus import arrow, huggingface, mds, megatron, npy, parquet
from libra.corpus.errors import CorpusError

Format = Literal["npy", "text", "jsonl", "parquet", "arrow", "megatron", "huggingface", "mds"]

SUFFIXES: Final[dict[str, Format]] = {
    ".npy": "npy",
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".idx": "megatron",
}
_MAGICS: Final[tuple[tuple[bytes, Format], ...]] = (
    (npy.MAGIC, "npy"),
    (parquet.MAGIC, "parquet"),
    (arrow.FILE_MAGIC, "arrow"),
    (arrow.STREAM_MAGIC, "arrow"),
    (megatron.MAGIC, "megatron"),
)
_UNREAD: Final = (
    (b"PK\x03\x04", "a zip archive (.npz?); save the lengths as one .npy"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; pipe it in: zstd -dc FILE | ... -"),
    (b"BZh", "compressed by bzip2; pipe it in: bzip2 -dc FILE | ... -"),
    (b"\xfd7zXZ", "compressed by xz; pipe it in: xz -dc FILE | ... -"),
)
_SHARD_OF: Final = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")


def detect_stream(head: bytes, name: str) -> Format:
    """The format of a file that starts with `head`.

    What it holds counts before its name: an array is read whatever it is called, and a name that
    promises a binary format leads to that reader, which says what is wrong.
    """
    for magic, known in _MAGICS:
        if head.startswith(magic):
            return known
    for magic, what in _UNREAD:
        if head.startswith(magic):
            raise CorpusError(name, f"is {what}")
    suffix = SUFFIXES.get(Path(name.removesuffix(".gz")).suffix)
    if suffix is not None:
        return suffix
    return "jsonl" if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else "text"


def detect_folder(folder: Path) -> Format | None:
    """The format of a folder that is one corpus; None for one that may hold files of lengths."""
    if (folder / huggingface.STATE).exists():
        return "huggingface"
    if (folder / mds.INDEX).exists():
        return "mds"
    if (folder / huggingface.SPLITS).exists():
        raise huggingface.refuse_splits(folder)
    return None


def list_shards(folder: Path) -> list[Path]:
    """The files of a folder of shards of one format, by name.

    Raises CorpusError where there is none, where formats are mixed, where names such as
    00001-of-00004 say that some are missing, and for cache files of Hugging Face datasets, which
    are parts of no corpus.
    """
    kinds: dict[Format, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        kind = SUFFIXES.get(Path(file.name.removesuffix(".gz")).suffix)
        if kind is not None and file.is_file() and not file.name.startswith("."):
            kinds.setdefault(kind, []).append(file)
    if not kinds:
        raise CorpusError(
            folder,
            f"is a folder with neither {huggingface.STATE} (Hugging Face), {mds.INDEX} (MDS) nor "
            f"files that end in {', '.join(SUFFIXES)}; name a file of sample lengths",
        )
    if len(kinds) > 1:
        first = ", ".join(files[0].name for files in kinds.values())
        raise CorpusError(
            folder, f"is a folder that mixes formats ({first}); name one file, or give the format"
        )
    (files,) = kinds.values()
    check_shards(folder, files)
    return files


def check_shards(folder: Path, files: list[Path]) -> None:
    """CorpusError for shards whose names say that others are missing, and for cache files."""
    series: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if file.name.startswith("cache-"):
            raise CorpusError(
                folder,
                f"is a cache of Hugging Face datasets ({file.name}); give what save_to_disk wrote",
            )
        if found := _SHARD_OF.fullmatch(file.name):
            before, number, total, after = found.groups()
            series.setdefault((before, total, after), set()).add(int(number))
    for (before, total, after), there in series.items():
        if len(there) < int(total):
            raise CorpusError(
                folder, f"holds {len(there)} of the {int(total)} files {before}*-of-{total}{after}"
            )
