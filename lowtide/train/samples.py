"""The sample before and after training, side by side."""

from pathlib import Path

from PIL import Image, ImageDraw

from lowtide.train.cache import Cached
from lowtide.train.config import TrainKeys
from lowtide.train.families.base import Denoiser
from lowtide.train.files import new_file

BEFORE, AFTER, BOTH = "sample-before.png", "sample-after.png", "sample-before-after.png"
_BAND = 16


def write_sample(denoiser: Denoiser, cached: Cached, keys: TrainKeys, name: str) -> None:
    """A picture from the cached prompt and the run's seed, in the size of the first example."""
    training = denoiser.model.training
    denoiser.model.eval()
    picture = denoiser.sample(
        cached.load_prompt(), cached.buckets[0], keys.validation_num_inference_steps, seed=keys.seed
    )
    denoiser.model.train(training)
    _save(picture, keys.output / name)


def write_pair(output: Path) -> Path | None:
    """Both samples in one picture, if both are there."""
    files = {"before": output / BEFORE, "after": output / AFTER}
    if not all(file.is_file() for file in files.values()):
        return None
    panels = {label: Image.open(file).convert("RGB") for label, file in files.items()}
    width, height = next(iter(panels.values())).size
    sheet = Image.new("RGB", (2 * width + _BAND, height + _BAND), "white")
    for place, (label, panel) in enumerate(panels.items()):
        left = place * (width + _BAND)
        ImageDraw.Draw(sheet).text((left + 4, 2), label, fill="black")
        sheet.paste(panel, (left, _BAND))
    _save(sheet, output / BOTH)
    return output / BOTH


def _save(picture: Image.Image, path: Path) -> None:
    with new_file(path) as partial:
        picture.save(partial, format="PNG")
