"""Families by name: keys, titles and aliases, however people spell them."""

import subprocess
import sys

import pytest

from lowtide import families
from lowtide.errors import ConfigError

KEYS = [row.key for row in families.all_families()]


def test_every_named_family_is_there():
    assert sorted(KEYS) == [
        "ace_step_15",
        "anima",
        "anima_text_conditioner",
        "anyflow",
        "auraflow",
        "bria",
        "chroma",
        "cogvideox",
        "cogview4",
        "cosmos2_image",
        "cosmos3",
        "cosmos3_edge",
        "ernie_image",
        "flux1",
        "flux2",
        "flux3_klein",
        "hidream",
        "hunyuan_image",
        "hunyuan_video",
        "hunyuan_video_15",
        "ideogram4",
        "kandinsky5_image",
        "kandinsky5_video",
        "kolors",
        "krea2",
        "longcat_image",
        "ltx2_3",
        "ltx_video_095",
        "lumina2",
        "minimax_h3",
        "mochi",
        "omnigen",
        "ovis_image",
        "pixart_sigma",
        "prx",
        "qwen_image",
        "qwen_image_21",
        "sana",
        "sana_video",
        "sd15",
        "sd3_medium",
        "sdxl",
        "stable_cascade_c",
        "wan21_14b",
        "wan21_1_3b",
        "z_image_turbo",
    ]


@pytest.mark.parametrize("row", families.all_families(), ids=KEYS)
def test_every_name_of_a_row_finds_that_row_in_any_spelling(row):
    for name in families.names_of(row):
        for spelling in (name, name.upper(), name.replace("_", "-"), name.replace(" ", ""), name.replace(".", "_")):
            assert families.find(spelling) is row


def test_no_two_families_answer_to_one_name():
    owners: dict[str, set[str]] = {}
    for row in families.all_families():
        for name in families.names_of(row):
            owners.setdefault("".join(filter(str.isalnum, name.lower())), set()).add(row.key)
    assert {name: keys for name, keys in owners.items() if len(keys) > 1} == {}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("flux.1", "flux1"),
        ("flux", "flux1"),
        ("flux2", "flux2"),
        ("sd3", "sd3_medium"),
        ("sdxl", "sdxl"),
        ("pixart", "pixart_sigma"),
        ("pixart_sigma", "pixart_sigma"),
        ("sana", "sana"),
        ("qwen_image", "qwen_image"),
        ("lumina2", "lumina2"),
        ("wan", "wan21_1_3b"),
        ("Wan 2.1 T2V 14B", "wan21_14b"),
        ("ltxvideo", "ltx_video_095"),
        ("z_image", "z_image_turbo"),
        ("Z-Image Turbo", "z_image_turbo"),
    ],
)
def test_names_that_trainers_use(name, key):
    assert families.find(name).key == key


def test_an_unknown_name_gets_the_nearest_ones_and_how_to_list_all():
    with pytest.raises(ConfigError) as error:
        families.find("flux11")
    assert "flux1" in str(error.value)
    assert "lowtide families" in str(error.value)
    assert error.value.exit_code == 2


def test_a_name_near_nothing_still_says_how_to_list_them():
    with pytest.raises(ConfigError, match="`lowtide families` lists them"):
        families.find("zzzzzzzz")


def test_by_class_finds_a_row_or_nothing():
    assert families.by_class("WanTransformer3DModel") is families.find("wan21_1_3b")
    assert families.by_class("UNet2DConditionModel") is families.find("sdxl")
    assert families.by_class("Linear") is None


def test_families_of_one_class_share_their_stacks():
    for row in families.all_families():
        first = families.by_class(row.class_name)
        assert first is not None and first.stacks == row.stacks


def test_importing_the_rows_loads_neither_torch_nor_diffusers():
    code = "import sys, lowtide.families; print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
