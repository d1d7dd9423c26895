"""What is alive at the fullest moment, reckoned by hand on a small scheduled program."""

import pytest

from lmwright.planner.compiler.compile import device_peak_bytes
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.peak import GRADIENTS, SAVED, TEMPORARIES, peak_split

# A forward loop fills a stack of four rows of 64 KiB; a backward loop reads it and fills the
# gradient of a weight [4,128,128]. KiB: saved 256, gradient 256, temporaries as commented.
PROGRAM = """
HloModule step, is_scheduled=true

%forward (a: (s32[], bf16[4,256,128], bf16[256,128])) -> (s32[], bf16[4,256,128], bf16[256,128]) {
  %a = (s32[], bf16[4,256,128]{2,1,0:T(8,128)(2,1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %stack = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%a), index=1
  %x = bf16[256,128]{1,0:T(8,128)(2,1)} get-tuple-element(%a), index=2
  %wide = f32[256,1024]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%c, metadata={op_name="jvp()/mul"}
  %thin = bf16[256,128]{1,0:T(8,128)(2,1)} fusion(%wide), kind=kLoop, calls=%c, metadata={op_name="jvp()/btf,fd->btd/dot_general"}
  %dynamic-update-slice.1 = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%stack, %thin, %i)
  ROOT %out = (s32[], bf16[4,256,128]{2,1,0:T(8,128)(2,1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) tuple(%i, %dynamic-update-slice.1, %thin)
}

%backward (b: (s32[], f32[4,128,128], bf16[4,256,128])) -> (s32[], f32[4,128,128], bf16[4,256,128]) {
  %b = (s32[], f32[4,128,128]{2,1,0:T(8,128)}, bf16[4,256,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %sums = f32[4,128,128]{2,1,0:T(8,128)} get-tuple-element(%b), index=1
  %kept = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%b), index=2
  %dw = f32[128,128]{1,0:T(8,128)} fusion(%kept), kind=kLoop, calls=%c, metadata={op_name="transpose(jvp())/btd,btf->df/dot_general"}
  %near = f32[4096,4096]{1,0:T(8,128)S(1)} fusion(%dw), kind=kLoop, calls=%c
  %dynamic-update-slice.2 = f32[4,128,128]{2,1,0:T(8,128)} dynamic-update-slice(%sums, %dw, %j), metadata={op_name="transpose(jvp())/while"}
  ROOT %out = (s32[], f32[4,128,128]{2,1,0:T(8,128)}, bf16[4,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%j, %dynamic-update-slice.2, %kept)
}

ENTRY %main (w: f32[4,128,128], rows: bf16[256,128]) -> f32[4,128,128] {
  %w = f32[4,128,128]{2,1,0:T(8,128)} parameter(0)
  %rows = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[] constant(0)
  %cast = bf16[4,128,128]{2,1,0:T(8,128)(2,1)} convert(%w)
  %empty = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %start = (s32[], bf16[4,256,128]{2,1,0:T(8,128)(2,1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) tuple(%zero, %empty, %rows)
  %up = (s32[], bf16[4,256,128]{2,1,0:T(8,128)(2,1)}, bf16[256,128]{1,0:T(8,128)(2,1)}) while(%start), condition=%k, body=%forward
  %filled = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%up), index=1
  %used = bf16[128]{0:T(256)(128)(2,1)} fusion(%cast), kind=kLoop, calls=%c
  %none = f32[4,128,128]{2,1,0:T(8,128)} broadcast(%zero)
  %begin = (s32[], f32[4,128,128]{2,1,0:T(8,128)}, bf16[4,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%zero, %none, %filled)
  %down = (s32[], f32[4,128,128]{2,1,0:T(8,128)}, bf16[4,256,128]{2,1,0:T(8,128)(2,1)}) while(%begin), condition=%k, body=%backward
  %sum = f32[4,128,128]{2,1,0:T(8,128)} get-tuple-element(%down), index=1
  ROOT %new = f32[4,128,128]{2,1,0:T(8,128)} fusion(%w, %sum), kind=kLoop, calls=%c
}
"""  # noqa: E501

KIB = 2**10


def test_the_fullest_moment_is_inside_the_forward_loop():
    # the stack (256), the cast weight (128), and in the loop %wide (1,024) with %thin (64)
    expected = {GRADIENTS: 0, SAVED: 256 * KIB, TEMPORARIES: (128 + 1024 + 64) * KIB}
    assert peak_split(parse(PROGRAM)) == expected


def test_the_fullest_moment_moves_to_the_backward_loop():
    # the stack, the gradient of the weight (256) and that of one row (64); the cast weight has
    # been read; %near is in vector memory, and the new weight takes the place of the old
    program = parse(PROGRAM.replace("f32[256,1024]", "f32[64,128]"))
    found = peak_split(program)
    assert found[SAVED] == 256 * KIB
    assert found[GRADIENTS] == 256 * KIB
    assert found[TEMPORARIES] == pytest.approx(64 * KIB, abs=KIB)


@pytest.mark.parametrize(
    "host, peak",
    [(0, 700), (500, 700), (2000, 100 + 1472)],  # KiB; arguments and temporaries, counted by hand
)
@pytest.mark.parametrize("moments", [0, 300])
def test_the_peak_of_a_chip_is_told_from_that_of_its_host(host, moments, peak):
    sizes = {"argument": 100, "live": max(700, 100 + host) + moments, "temp": 4000, "code": 0}
    sizes |= {"host": host + moments, "host_argument": moments}
    answer = {f"{name}_bytes": size * KIB for name, size in sizes.items()} | {"slice": "v5e-8"}
    assert device_peak_bytes(answer, PROGRAM) == peak * KIB
    fewer = answer | {"temp_bytes": 300 * KIB}
    assert device_peak_bytes(fewer, PROGRAM) == (400 if host == 2000 else peak) * KIB
