"""Names of slices: counts as the clouds publish them, and what is said of wrong ones."""

import pytest

from lmwright.errors import UserError
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.slices import names_of, parse_slice, topology_request


@pytest.mark.parametrize(
    "text, shape, chips, devices",
    [
        # https://cloud.google.com/tpu/docs: v4-32 is 2x2x4, v5p-128 is 4x4x4, v5e-8 is 2x4 ...
        ("v4-8", (2, 2, 1), 4, 4),
        ("tpu:v4-32", (2, 2, 4), 16, 16),
        ("v4:2x2x4", (2, 2, 4), 16, 16),
        ("v5p-128", (4, 4, 4), 64, 64),
        ("v5e-8", (2, 4), 8, 8),
        ("v5litepod-256", (16, 16), 256, 256),
        ("v6e-256", (16, 16), 256, 256),
        ("v3-8", (2, 2), 4, 8),
        ("2xv5e-256", (16, 16), 512, 512),
        ("2xv4:2x2x4", (2, 2, 4), 32, 32),
        ("v4:4x4x12", (4, 4, 12), 192, 192),
        ("v5e:1x1", (1, 1), 1, 1),
        ("7x-8", (2, 2, 1), 4, 8),
        ("tpu7x-128", (4, 4, 4), 64, 128),
        ("4x7x-128", (4, 4, 4), 256, 512),
    ],
)
def test_published_names(text, shape, chips, devices):
    where = parse_slice(text)
    assert (where.shape, where.num_chips, where.num_devices) == (shape, chips, devices)
    assert parse_slice(where.name) == where


@pytest.mark.parametrize("generation", CHIPS)
def test_every_named_slice_reads_back(generation):
    for name in names_of(generation):
        where = parse_slice(name)
        assert where.name == name
        assert topology_request(where)["topology_name"].count("x") >= 1


@pytest.mark.parametrize(
    "text, words",
    [
        ("v4-33", ["v4 has no slice of 33", "TensorCores", "v4-32"]),
        ("v5e-9", ["v5e-8", "chips"]),
        ("v5f-8", ["nearest:", "v5e-8"]),
        ("a100", ["unknown machine", "gpu:h100x8"]),
        ("v5e:3x5", ["no TPU v5 lite slice of this shape", "nearest:", "4x4"]),
        ("v5e:32x32", ["16x16"]),
        ("v6e:1x4", ["2x2"]),
        ("v4:3x5x7", ["multiples of 4", "4x4x8"]),
        ("v4:4x4x2", ["2x4x4"]),
        ("v5p:64x64x64", ["16x16x16"]),
        ("v4:2x2", ["3 dimensions"]),
        ("v5e:2xx4", ["2 dimensions"]),
        ("0xv5e-8", ["at least one"]),
    ],
)
def test_wrong_names_get_the_nearest(text, words):
    with pytest.raises(UserError) as error:
        parse_slice(text)
    assert all(word in str(error.value) for word in words), error.value
