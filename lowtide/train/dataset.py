"""A folder of pictures with captions: what is in it, in which size each is trained, in which order."""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lowtide.errors import ConfigError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_UNREADABLE = (
    ArithmeticError, EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip
"""What Pillow raises for files that are no pictures, or whose EXIF data are of other types than they should be."""
_WHITE = (255, 255, 255, 255)
_COARSEST_SIDES = 16
_MOST_SHOWN = 3
_MOST_GREY = 2**16 - 1


@dataclass(frozen=True)
class Example:
    """One picture. digest: of the file's bytes. size: (width, height) in pixels, as it lies in the file."""

    picture: Path
    caption: str
    digest: str
    size: tuple[int, int]


def read_folder(folder: Path) -> list[Example]:
    """Every picture under ``folder``, in order of its path; each is decoded once, so that a bad one is found now.

    Raises ConfigError: no folder, no picture in it, a picture that cannot be read or has no caption (names each).
    """
    if not folder.is_dir():
        raise ConfigError(f"data_dir: there is no folder {folder}")
    pictures = [path for path in sorted(folder.rglob("*")) if _is_picture(path, folder)]
    if not pictures:
        raise ConfigError(f"data_dir: no picture in {folder}; expected files ending in {', '.join(SUFFIXES)}")
    examples, problems = [], []
    for path in pictures:
        try:
            examples.append(_example(path))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise ConfigError(f"data_dir: {'; '.join(problems[:_MOST_SHOWN])}{more}")
    return examples


def bucket_of(size: tuple[int, int], resolution: int, multiple: int) -> tuple[int, int]:
    """(width, height) in which a picture is trained: about its shape, about resolution² pixels.

    Sides are multiples of ``multiple``, and so coarse that pictures of nearly one shape share a bucket.
    """
    step = max(multiple, resolution // _COARSEST_SIDES // multiple * multiple)
    stretch = math.sqrt(size[0] / size[1])
    width, height = (max(1, round(side / step)) * step for side in (resolution * stretch, resolution / stretch))
    return width, height


def read_pixels(path: Path, size: tuple[int, int]) -> Tensor:
    """(1, 3, height, width) in −1 … 1: scaled to cover (width, height), the rest cut off evenly."""
    with Image.open(path) as image:
        fitted = ImageOps.fit(_upright(image), size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1)[None].float() / 127.5 - 1


def batches(buckets: Sequence[tuple[int, int]], batch_size: int, seed: int, skip: int = 0) -> Iterator[tuple[int, ...]]:
    """Indices of the examples of one batch after another, without end; a batch has one size of picture.

    buckets: the size of every example. Each epoch holds every example once, in an order that depends only on ``seed``
    and the epoch's number: so ``skip`` batches already used are skipped exactly.
    """
    epoch = 0
    while True:
        order = _epoch(buckets, batch_size, np.random.default_rng((seed, epoch)))
        yield from order[skip:]
        skip = max(0, skip - len(order))
        epoch += 1


def _epoch(buckets: Sequence[tuple[int, int]], batch_size: int, random: np.random.Generator) -> list[tuple[int, ...]]:
    by_size: dict[tuple[int, int], list[int]] = {}
    for index in random.permutation(len(buckets)).tolist():
        by_size.setdefault(buckets[index], []).append(index)
    order = [
        tuple(members[start : start + batch_size])
        for members in by_size.values()
        for start in range(0, len(members), batch_size)
    ]
    return [order[place] for place in random.permutation(len(order))]


def _is_picture(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in SUFFIXES and path.is_file() and not hidden


def _example(path: Path) -> Example:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with Image.open(path) as image:
            size = _upright(image).size
    except _UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read as a picture ({error})") from error
    return Example(path, _caption(path.with_suffix(".txt")), digest, size)


def _caption(path: Path) -> str:
    try:
        caption = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: every picture needs its caption beside it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text ({error})") from error
    if not caption:
        raise ConfigError(f"{path} is empty: every picture needs a caption")
    return caption


def _upright(image: Image.Image) -> Image.Image:
    """Decoded, turned as its EXIF data say, in RGB; what is transparent lies on white."""
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):  # Pillow would cut off all that is over 255
        turned = _of_16_bits(turned)
    if turned.has_transparency_data:
        layer = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer)
    return turned.convert("RGB")


def _of_16_bits(image: Image.Image) -> Image.Image:
    """Grey of 8 bits. Raises ValueError for values that no picture of 16 bits has."""
    values = np.array(image).astype(np.int64)
    if values.min() < 0 or values.max() > _MOST_GREY:
        raise ValueError(f"grey values of more than 16 bits: {values.min()} to {values.max()}")
    return Image.fromarray((values / (_MOST_GREY / 255)).round().astype(np.uint8))
