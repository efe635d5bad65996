"""The cache: made once, made anew where its content changed, never half written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from lowtide.errors import ConfigError
from lowtide.train.config import TrainConfig
from lowtide.train.prepare import Prepared, prepare
from lowtide.train.progress import Reporter


class Counting(Reporter):
    """Counts what the cache makes, by title."""

    def __init__(self) -> None:
        self.made: dict[str, int] = {}

    def say(self, text: str) -> None:
        pass

    def track(self, title: str, items: Any) -> Any:
        self.made[title] = len(items)
        return items


def made(flat: dict[str, Any], **over: Any) -> tuple[int, int, Prepared]:
    counting = Counting()
    prepared = prepare(TrainConfig.from_flat({**flat, **over}), counting)
    return (
        counting.made.get("pictures into latents", 0),
        counting.made.get("captions into embeddings", 0),
        prepared,
    )


@pytest.fixture
def own(flat: dict[str, Any], photos: Path, pipeline_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """Keys of a run with its own photographs and an empty cache."""
    return {
        **flat,
        "data_dir": str(photos),
        "cache_dir": str(tmp_path / "cache"),
        "pretrained_model_name_or_path": str(pipeline_dir),
    }


def test_only_what_changed_is_made_again(own: dict[str, Any], photos: Path) -> None:
    pictures, captions, first = made(own)
    assert (pictures, captions) == (6, 6)
    assert made(own)[:2] == (0, 0)
    (photos / "cat.txt").write_text("quite another caption")
    with Image.open(photos / "rocket.jpg") as image:
        ImageOps.mirror(image).save(photos / "rocket.jpg")
    pictures, captions, second = made(own)
    assert (pictures, captions) == (1, 1)
    assert second.cached.digest != first.cached.digest
    assert not torch.equal(second.cached.load_latents(5), first.cached.load_latents(5))
    assert torch.equal(second.cached.load_latents(0), first.cached.load_latents(0))


def test_other_settings_make_other_files(own: dict[str, Any]) -> None:
    made(own)
    assert made(own, resolution=128)[:2] == (6, 0)
    assert made(own, tokenizer_max_length=72)[:2] == (6, 6)
    assert made(own, validation_prompt="a dog")[:2] == (0, 1)


def test_a_broken_file_is_made_again(own: dict[str, Any]) -> None:
    path = made(own)[2].cached.latents[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert made(own)[:2] == (1, 0)
    assert path.read_bytes() == whole


def test_latents_and_embeddings_are_the_encoders_own(prepared: Prepared, pipeline_dir: Path) -> None:
    from diffusers import FluxPipeline

    from lowtide.train.dataset import read_folder, read_pixels

    pipe: Any = FluxPipeline.from_pretrained(str(pipeline_dir), local_files_only=True)
    example = read_folder(prepared.config.keys.data)[1]
    pixels = read_pixels(example.picture, prepared.cached.buckets[1])
    with torch.no_grad():
        raw = pipe.vae.encode(pixels).latent_dist.mode()[0]
        prompt, pooled, _ = pipe.encode_prompt(example.caption, None, max_sequence_length=64)
    latents = prepared.cached.load_latents(1)
    assert torch.equal(latents, (raw - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor)
    text = prepared.cached.load_text(1)
    assert torch.equal(text["prompt"], prompt[0]) and torch.equal(text["pooled"], pooled[0])


def test_a_bad_picture_is_found_before_anything_is_written(own: dict[str, Any], photos: Path) -> None:
    (photos / "cat.jpg").write_bytes(b"no picture")
    with pytest.raises(ConfigError, match=r"cat\.jpg cannot be read as a picture"):
        made(own)
    assert not Path(own["cache_dir"]).exists() and not Path(own["output_dir"]).exists()


def test_a_folder_that_is_no_pipeline(own: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pretrained_model_name_or_path: there is no folder .*nowhere"):
        made(own, pretrained_model_name_or_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"cannot read .*model_index.json"):
        made(own, pretrained_model_name_or_path=own["data_dir"])
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    with pytest.raises(ConfigError, match="holds a SanaPipeline, but this model_family needs a FluxPipeline"):
        made(own, pretrained_model_name_or_path=str(other))
    assert not Path(own["cache_dir"]).exists()


def test_a_long_caption_is_cut_with_a_warning(own: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"a caption has \d+ tokens; what comes after 8 is not used"):
        made(own, tokenizer_max_length=8)
