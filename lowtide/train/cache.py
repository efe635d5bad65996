"""The cache: latents and text embeddings of a data set, made once by the pipeline's own encoders."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from lowtide.errors import MachineError
from lowtide.train.alone import alone_in
from lowtide.train.dataset import Example, bucket_of, read_pixels
from lowtide.train.families.base import Encoders
from lowtide.train.files import clean_up, folder_with_something, write_tensors

_FORMAT = 1
_LATENTS = "latents"
_T = TypeVar("_T")


class Track(Protocol):
    """Shows how far a piece of work is: yields ``items`` one after another."""

    def __call__(self, title: str, items: Sequence[_T]) -> Iterable[_T]: ...


@dataclass(frozen=True)
class Cached:
    """What a run reads from the cache.

    buckets: (width, height) of every example. latents, captions: their files, in the examples' order.
    prompt: the file of the sample's caption.
    """

    buckets: tuple[tuple[int, int], ...]
    latents: tuple[Path, ...]
    captions: tuple[Path, ...]
    prompt: Path

    @property
    def digest(self) -> str:
        """Names what is trained on: other pictures, captions, sizes or encoders give another."""
        names = [path.name for path in (*self.latents, *self.captions)]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:24]

    def load_latents(self, index: int) -> Tensor:
        """(channels, height, width)."""
        return _read(self.latents[index])[_LATENTS]

    def load_text(self, index: int) -> dict[str, Tensor]:
        return _read(self.captions[index])

    def load_prompt(self) -> dict[str, Tensor]:
        return _read(self.prompt)


@dataclass(frozen=True)
class CachePlan:
    """Which files a data set needs. pictures: by file, the example and its size. texts: by file, the caption."""

    cached: Cached
    pictures: Mapping[Path, tuple[Example, tuple[int, int]]]
    texts: Mapping[Path, str]


def plan_cache(
    folder: Path, examples: Sequence[Example], prompt: str, identity: Mapping[str, str], resolution: int, multiple: int
) -> CachePlan:
    """Each file is named by the content that it is made from, so a changed picture or caption has a new file.

    identity: says which encoders, in which setting: another value names other files. multiple: of picture sides.
    """
    buckets = tuple(bucket_of(example.size, resolution, multiple) for example in examples)
    latents = tuple(
        folder / _name("picture", identity, example.digest, f"{width}x{height}")
        for example, (width, height) in zip(examples, buckets, strict=True)
    )
    captions = [*(example.caption for example in examples), prompt]
    texts = tuple(folder / _name("text", identity, caption) for caption in captions)
    return CachePlan(
        Cached(buckets, latents, texts[:-1], texts[-1]),
        dict(zip(latents, zip(examples, buckets, strict=True), strict=True)),
        dict(zip(texts, captions, strict=True)),
    )


def fill_cache(plan: CachePlan, folder: Path, open_encoders: Callable[[], Encoders], track: Track) -> int:
    """Make what is missing or broken, and return how many files that were. Encoders are opened only if some are.

    Raises MachineError where the disk failed; what was made before stays. ConfigError where another process fills it.
    """
    with folder_with_something(folder), alone_in(folder, "cache_dir"):
        return _fill(plan, folder, open_encoders, track)


def _fill(plan: CachePlan, folder: Path, open_encoders: Callable[[], Encoders], track: Track) -> int:
    clean_up(folder)
    pictures = [path for path in plan.pictures if not _is_whole(path)]
    texts = [path for path in plan.texts if not _is_whole(path)]
    if not pictures and not texts:
        return 0
    encoders = open_encoders()
    for path in track("pictures into latents", pictures):
        example, size = plan.pictures[path]
        write_tensors(path, {_LATENTS: encoders.latents(read_pixels(example.picture, size))})
    for path in track("captions into embeddings", texts):
        write_tensors(path, encoders.text(plan.texts[path]))
    return len(pictures) + len(texts)


def _is_whole(path: Path) -> bool:
    """Whether it is there and as long as its header says."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool(file.keys())
    except (OSError, SafetensorError):
        return False


def _name(kind: str, identity: Mapping[str, str], *parts: str) -> str:
    content = json.dumps([_FORMAT, kind, dict(identity), *parts], sort_keys=True)
    return f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:24]}.safetensors"


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise MachineError(f"cannot read {path}: {error}. Run the same command again: it is made anew") from error
