import pytest

from edgespec.core.errors import ArtifactError
from edgespec_converters.recipes import FLOAT, Format, fit, load_recipe, recipe_names

MIXED = """
name = "mixed"
[default]
bits = 4
block = 32
symmetric = false
[[rules]]
tensors = "model.layers.*.mlp.down_proj.weight"
bits = 8
block = 64
[[rules]]
tensors = "model.layers.0.*"
bits = 16
[gate]
argmax_agreement = 0.5
kl = 1
"""


def written(tmp_path, text):
    path = tmp_path / "r.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_under_their_own_name(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.format_for("model.norm.weight", (64,)) == FLOAT


def test_shipped_recipes_keep_widths_bit_exact_and_heads_at_8_bits():
    assert recipe_names() == ["float32", "int4", "int8"]
    assert load_recipe("int8").default == Format(8, 64)
    int4 = load_recipe("int4")
    assert int4.default == Format(4, 32, False)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert int4.format_for(name, (100, 64)) == Format(8, 32)


def test_first_matching_rule_wins(tmp_path):
    recipe = load_recipe(written(tmp_path, MIXED))
    assert recipe.format_for("model.layers.0.mlp.down_proj.weight", (8, 64)) == Format(8, 64)
    assert recipe.format_for("model.layers.0.mlp.up_proj.weight", (8, 64)) == Format(16)
    assert recipe.format_for("model.layers.1.mlp.up_proj.weight", (8, 64)) == Format(4, 32, False)
    assert recipe.gate.kl == 1.0


def test_esb_63_block_falls_back_and_says_why():
    wanted = Format(8, 64)
    assert fit(wanted, 4352) == (wanted, None)
    assert fit(wanted, 4304) == (Format(8, 16), "int8 block 16 (block 64 does not divide 4304 columns)")
    assert fit(wanted, 32) == (Format(8, 32), "int8 block 32 (block 64 does not divide 32 columns)")
    assert fit(wanted, 8) == (FLOAT, "float32 (block 64 does not divide 8 columns)")
    assert fit(wanted, 4304, blocks=(32, 64, 128)) == (FLOAT, "float32 (block 64 does not divide 4304 columns)")
    assert fit(Format(4, 256), 512, blocks=(32, 64, 128)) == (Format(4, 128), "int4 block 128 (no block 256 on this engine)")
    assert fit(Format(16), 7) == (Format(16), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("bits = 4", "bits = 5"), "4, 8, 16 or 32 bits, got 5"),
        (("bits = 4", "bits = true"), "default.bits must be of type int, got True"),
        (("bits = 4", 'bits = "4"'), "default.bits must be of type int, got '4'"),
        (("block = 32", "block = 48"), "needs a block of 16, 32, 64, 128, 256, got 48"),
        (("bits = 16", "bits = 16\nblock = 32"), "is a float and has no block"),
        (("block = 32", "blok = 32"), r"unknown keys \['blok'\] in default"),
        (("[gate]", "[gates]"), r"unknown keys \['gates'\] in the recipe"),
        (("kl = 1", 'kl = "low"'), "gate.kl must be a number, got 'low'"),
        (('name = "mixed"', ""), "name must be of type str, got None"),
        (('"mixed"', '"../mixed"'), "is no package name"),
        (("kl = 1", "kl ="), "cannot read recipe"),
        (('tensors = "model.layers.0.*"', "tensors = 3"), r"rules\[1\].tensors must be of type str, got 3"),
    ],
)
def test_mistakes_are_named(tmp_path, change, message):
    assert change[0] in MIXED
    with pytest.raises(ArtifactError, match=message):
        load_recipe(written(tmp_path, MIXED.replace(*change)))


def test_unknown_name_lists_what_there_is(tmp_path):
    with pytest.raises(ArtifactError, match="no recipe 'int5'; there are float32, int4, int8"):
        load_recipe("int5")
    with pytest.raises(ArtifactError, match="cannot read recipe"):
        load_recipe(tmp_path / "missing.toml")
