"""Parts of the model and buffers, read from a program's own tables."""

import pytest

from lmwright.planner.compiler.buffers import Buffer, largest_buffers, padded_bytes
from lmwright.planner.compiler.cost import Estimate
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.parts import OTHER, part_of, read_frames
from lmwright.planner.report import buffer_lines, part_lines

# libtpu 0.0.42.1, shortened
PROGRAM = """
HloModule jit_train_step, is_scheduled=true

FileNames
1 "/somewhere/site-packages/lmwright/models/llama.py"
2 "/somewhere/site-packages/lmwright/nn/norm.py"
3 "/somewhere/site-packages/lmwright/core/stack.py"
4 "/somewhere/site-packages/lmwright/optim/adamw.py"

FunctionNames
1 "Llama.hidden.<locals>.block"
2 "Llama._qkv"
3 "rms_norm"
4 "run_stack.<locals>.<lambda>"
5 "lookup"
6 "direction"

FileLocations
1 {file_name_id=1 function_name_id=1 line=126 end_line=126 column=22 end_column=22}
2 {file_name_id=1 function_name_id=2 line=187 end_line=187 column=12 end_column=12}
3 {file_name_id=2 function_name_id=3 line=10 end_line=10 column=24 end_column=24}
4 {file_name_id=3 function_name_id=4 line=52 end_line=52 column=24 end_column=24}
5 {file_name_id=1 function_name_id=5 line=9 end_line=9 column=4 end_column=4}
6 {file_name_id=4 function_name_id=6 line=9 end_line=9 column=4 end_column=4}

StackFrames
1 {file_location_id=4 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}
4 {file_location_id=3 parent_frame_id=4}
5 {file_location_id=5 }
6 {file_location_id=6 parent_frame_id=1}

%body (arg: (s32[], bf16[4,8,512,1024])) -> (s32[], bf16[4,8,512,1024]) {
  %arg = (s32[]{:T(128)}, bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %stack = bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %product = bf16[8,512,1024]{2,1,0:T(8,128)(2,1)} fusion(%i), kind=kOutput, calls=%other, metadata={op_name="jit(train_step)/jvp()/while/body/btd,df->btf/dot_general" stack_frame_id=2}
  %dynamic-update-slice_fusion.1 = bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)} fusion(%stack, %product, %i), kind=kLoop, calls=%other, metadata={op_name="jit(train_step)/jvp()/while/body/dynamic_update_slice" stack_frame_id=1}
  ROOT %out = (s32[]{:T(128)}, bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)}) tuple(%i, %dynamic-update-slice_fusion.1)
}

%cond (arg.1: (s32[], bf16[4,8,512,1024])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %lt = pred[]{:T(512)} constant(false)
}

ENTRY %main (a: s32[]) -> bf16[8] {
  %a = s32[]{:T(128)} parameter(0)
  %empty = bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="broadcast.1"}
  %norm = f32[8,512]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%other, metadata={op_name="jit(train_step)/jvp()/reduce_sum" stack_frame_id=4}
  %near = f32[8,512,1024]{2,1,0:T(8,128)S(1)} fusion(%a), kind=kLoop, calls=%other, metadata={op_name="jit(train_step)/jvp()/mul" stack_frame_id=3}
  %rows = bf16[1000,100]{1,0:T(8,128)(2,1)} fusion(%a), kind=kLoop, calls=%other, metadata={op_name="jit(train_step)/jvp()/gather" stack_frame_id=5}
  %update = f32[8,8]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%other, metadata={op_name="jit(train_step)/mul" stack_frame_id=6}
  %init = (s32[]{:T(128)}, bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)}) tuple(%a, %empty)
  %loop = (s32[]{:T(128)}, bf16[4,8,512,1024]{3,2,1,0:T(8,128)(2,1)}) while(%init), condition=%cond, body=%body
  ROOT %nothing = bf16[8]{0:T(256)} constant({...})
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "name, part",
    [
        ("norm", "norm"),  # the innermost frame that is known
        ("near", "layers"),  # _qkv says nothing of itself; the stack around it does
        ("rows", "embedding"),
        ("update", "optimizer"),
        ("empty", OTHER),
    ],
)
def test_parts_by_the_stack_of_functions(name, part):
    program = parse(PROGRAM)
    step = program.computations["main"].by_name[name]
    assert part_of(step, read_frames(program.text)) == part


def test_a_product_is_known_by_its_letters():
    program = parse(PROGRAM)
    step = program.computations["body"].by_name["product"]
    assert part_of(step, read_frames("")) == "mlp"  # without any table


def test_buffers_are_named_after_what_fills_them():
    found = largest_buffers(parse(PROGRAM), 3)
    assert found[0] == Buffer("bf16[4,8,512,1024]", 4 * 8 * 512 * 1024 * 2, "saved, mlp")
    assert found[1] == Buffer("bf16[8,512,1024]", 8 * 512 * 1024 * 2, "mlp")
    assert found[2].shape == "bf16[1000,100]"  # not %near, which lives in vector memory


@pytest.mark.parametrize(
    "text, size",
    [
        ("bf16[1000,100]{1,0:T(8,128)(2,1)}", 1000 * 128 * 2),
        ("bf16[100,1000]{0,1:T(8,128)(2,1)}", 128 * 1000 * 2),
        ("f32[3,5,7]{2,1,0:T(8,128)}", 3 * 8 * 128 * 4),
        ("f32[1000]{0:T(1024)}", 1024 * 4),
        ("f32[1000]{0}", 4000),
    ],
)
def test_tiles_are_counted_full(text, size):
    assert padded_bytes(text) == size


def test_lines_leave_out_what_is_small():
    found = Estimate()
    found.spend("mlp", "matmul", 0.9)
    found.spend("mlp", "vector", 0.004)
    found.spend("norm", "vector", 0.001)
    assert part_lines(found) == ["by part:", "     0.904 s  mlp: 0.900 matmul"]
    assert buffer_lines([Buffer("f32[2]", 8, "norm")]) == []
