"""Pictures and captions: what is read, in which size, in which order, and what is refused."""

import io
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lowtide.errors import ConfigError
from lowtide.train.dataset import batches, bucket_of, read_folder, read_pixels

SIZES = ((64, 64), (96, 48), (48, 96))


def test_the_photographs(quickstart: Path) -> None:
    examples = read_folder(quickstart / "photos")
    assert [example.picture.name for example in examples] == [
        "astronaut.jpg",
        "cat.jpg",
        "coffee.jpg",
        "galaxies.jpg",
        "photographer.jpg",
        "rocket.jpg",
    ]
    assert all(len(example.caption.split()) > 5 for example in examples)
    sources = (quickstart / "photos" / "SOURCES.md").read_text()
    assert all(f"`{example.picture.name}`" in sources for example in examples)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cat.jpg", b"not a picture", r"cat.jpg cannot be read as a picture"),
        ("cat.jpg", None, r"cat.jpg cannot be read as a picture"),
        ("cat.txt", b"", r"cat.txt is empty"),
        ("cat.txt", b"\xff\xfe", r"cat.txt cannot be read as UTF-8"),
    ],
)
def test_a_bad_file_is_named(photos: Path, name: str, content: bytes | None, message: str) -> None:
    path = photos / name
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    with pytest.raises(ConfigError, match=message):
        read_folder(photos)


def test_all_bad_files_are_told_at_once(photos: Path) -> None:
    (photos / "cat.jpg").write_bytes(b"no")
    (photos / "rocket.txt").unlink()
    with pytest.raises(ConfigError, match=r"cat.jpg .*; .*rocket.txt is missing"):
        read_folder(photos)


def test_folders_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / ".hidden.png").write_bytes(b"")
    with pytest.raises(ConfigError, match="no picture in"):
        read_folder(tmp_path)


def test_a_picture_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 30)).save(tmp_path / "a.jpg", exif=exif)
    (tmp_path / "a.txt").write_text("a caption")
    assert read_folder(tmp_path)[0].size == (30, 60)


def test_exif_data_of_a_wrong_type_are_named_with_their_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x011A] = 6, 1.5
    file = io.BytesIO()
    Image.new("RGB", (48, 40)).save(file, "JPEG", exif=exif)
    content = bytearray(file.getvalue())
    for order in "<>":  # bytes where the resolution, a fraction, is expected
        place = content.find(struct.pack(f"{order}HHI", 0x011A, 5, 1))
        if place >= 0:
            content[place : place + 8] = struct.pack(f"{order}HHI", 0x011A, 7, 8)
    (tmp_path / "a.jpg").write_bytes(content)
    (tmp_path / "a.txt").write_text("a caption")
    with pytest.raises(ConfigError, match="a.jpg cannot be read as a picture"):
        read_folder(tmp_path)


def test_grey_pictures_of_sixteen_bits_keep_their_values(tmp_path: Path) -> None:
    values = np.linspace(0, 2**16 - 1, 64 * 64).astype("uint16").reshape(64, 64)
    Image.fromarray(values).save(tmp_path / "grey.png")
    pixels = read_pixels(tmp_path / "grey.png", (64, 64))
    assert pixels[0, 0].numpy() == pytest.approx(values / (2**16 - 1) * 2 - 1, abs=1 / 128)
    Image.fromarray(np.full((4, 4), 2**17, dtype="int32")).save(tmp_path / "deep.tiff")
    with pytest.raises(ValueError, match="more than 16 bits"):
        read_pixels(tmp_path / "deep.tiff", (4, 4))


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (read_pixels(tmp_path / "a.png", (8, 8)) == 1).all()
    Image.new("RGBA", (8, 8), (255, 0, 0, 255)).save(tmp_path / "b.png")
    assert read_pixels(tmp_path / "b.png", (8, 8))[0, :, 0, 0].tolist() == [1, -1, -1]


@given(st.integers(1, 8000), st.integers(1, 8000), st.sampled_from([96, 224, 512, 1024]), st.sampled_from([8, 16, 32]))
def test_buckets(width: int, height: int, resolution: int, multiple: int) -> None:
    bucket = bucket_of((width, height), resolution, multiple)
    assert all(side > 0 and side % multiple == 0 for side in bucket)
    assert bucket_of((height, width), resolution, multiple) == bucket[::-1]
    if 1 / 2 <= width / height <= 2:
        assert bucket[0] * bucket[1] == pytest.approx(resolution**2, rel=0.5)
        assert bucket[0] / bucket[1] == pytest.approx(width / height, rel=0.5)


def test_near_shapes_share_a_bucket() -> None:
    assert bucket_of((1000, 1000), 1024, 16) == bucket_of((1000, 1030), 1024, 16) == (1024, 1024)
    assert bucket_of((288, 192), 224, 16) == (272, 176)


def test_pixels_cover_the_size_in_their_range(quickstart: Path) -> None:
    pixels = read_pixels(quickstart / "photos" / "cat.jpg", (64, 96))
    assert pixels.shape == (1, 3, 96, 64)
    assert -1 <= pixels.min() < -0.5
    assert 0.5 < pixels.max() <= 1


@settings(deadline=None)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 30))
def test_batches(buckets: list[tuple[int, int]], batch_size: int, skip: int) -> None:
    start = list(itertools.islice(batches(buckets, batch_size, seed=1), skip + 20))
    assert list(itertools.islice(batches(buckets, batch_size, seed=1, skip=skip), 20)) == start[skip:]
    in_epoch = sum(-(-buckets.count(size) // batch_size) for size in set(buckets))
    epoch = list(itertools.islice(batches(buckets, batch_size, seed=1), in_epoch))
    assert sorted(itertools.chain(*epoch)) == list(range(len(buckets)))
    assert all(len({buckets[index] for index in batch}) == 1 and len(batch) <= batch_size for batch in epoch)


def test_epochs_and_seeds_differ() -> None:
    buckets = [SIZES[0]] * 20
    both = list(itertools.islice(batches(buckets, 20, seed=1), 2))
    assert both[0] != both[1]
    assert both[0] != next(batches(buckets, 20, seed=2))
