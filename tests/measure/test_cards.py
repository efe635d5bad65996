"""Cards by name."""

import pytest

from lowtide.errors import ConfigError
from lowtide.measure.cards import CARDS, find_card


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("4060", "RTX 4060"),
        ("RTX 4060 Ti", "RTX 4060 Ti 16GB"),
        ("rtx4060ti", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100 40 GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX A6000", "A6000"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        *((card.name, card.name) for card in CARDS),
    ],
)
def test_names_of_one_card(name: str, card: str) -> None:
    assert find_card(name).name == card


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A100", "Did you mean A100 40GB or A100 80GB?"),
        ("4060 Ti 8GB", "Did you mean RTX 4060 Ti 16GB?"),
        ("4080 SUPER", "Did you mean RTX 4080?"),
        ("RTX 4090 Laptop GPU", "Did you mean RTX 4090?"),
        ("5900", "Did you mean RTX 5090"),
        ("", "Known: RTX 3060 12GB"),
    ],
)
def test_what_may_be_meant_is_told_and_not_taken(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_card(name)
    assert hint in str(error.value)


def test_cards_with_half_the_lanes_have_half_the_link() -> None:
    rates = {name: find_card(name).link.out_gib_per_s for name in ("4060", "4060 Ti", "5060 Ti", "4090", "5090")}
    assert rates["4060"] == rates["4060 Ti"] < 0.55 * rates["4090"]
    assert rates["5060 Ti"] < 0.55 * rates["5090"]
