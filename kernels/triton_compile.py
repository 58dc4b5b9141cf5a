"""Compile the kernels for a GPU that is not here, and read what came out.

`compile_offline("forward", paper(), capability=90)` compiles exactly the kernel that a launch with
those numerics would use: the same constants, blocks and specialisation. `compile_hopper` compiles
the kernel that takes its place where `kernels.hopper_attention` lets it. Both need Triton but no
driver, and must run in a process without TRITON_INTERPRET. What is read: the matrix instructions
(wgmma on compute capability 9.0, mma.sync on 8.0), the conversions that round, and registers,
spilled bytes and shared memory of one program.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from . import triton_attention as host
from .hopper_plans import Plan
from .numerics import Numerics
from .triton_blocks import ADA_SHARED, HOPPER_SHARED, Blocks

KERNELS = ("forward", "grad_keys", "grad_queries", "delta_product")
_LIMITS = {80: 166_912, 86: ADA_SHARED, 89: ADA_SHARED, 90: HOPPER_SHARED}
STRIDE = re.compile(r"d?[qkvo]_[bht]")  # multiples of 16, for the shapes compiled here
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture. registers per thread; spilled and shared bytes.

    ir: Triton's own, of kernels for Hopper GPUs.
    """

    kernel: str
    capability: int
    blocks: Blocks
    ptx: str
    shared: int
    registers: int | None
    spilled: int | None
    cubin: bytes = b""
    ir: str = ""

    @property
    def matrix_instructions(self) -> tuple[str, ...]:
        """Kinds of matrix instruction in the PTX, ('wgmma.mma_async',) or ('mma.sync',)."""
        found = re.findall(r"\b(wgmma\.mma_async|mma\.sync)", self.ptx)
        return tuple(sorted(set(found)))


def compile_offline(
    kernel: str,
    numerics: Numerics,
    *,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    probe: bool | str = False,
    capability: int = 90,
    blocks: Blocks | None = None,
    usage: bool = True,
) -> Compiled:
    """Compile one of KERNELS as a launch on contiguous inputs would. Seconds per call.

    `usage=False` leaves out registers and spills. Raises ValueError for an unknown kernel, and
    what Triton raises where the kernel cannot be compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; use one of {', '.join(KERNELS)}")
    function, scale = _kernel(kernel), 1 / math.sqrt(head_dim)
    if blocks is None:
        table = "grad_queries" if kernel == "delta_product" else kernel
        itemsize = host._itemsize(numerics, (dtype,))
        blocks = host._blocks(
            table, numerics, head_dim, head_dim, itemsize, _LIMITS[capability], probe
        )
    arguments = host.launch_arguments(kernel, numerics, blocks, head_dim, head_dim, scale, probe)
    options = host._options(blocks)
    constants = {name: x for name, x in arguments.items() if name not in options}
    constants |= dict(CAUSAL=causal)
    constants |= dict(EVEN=True, GROUPED=False) if kernel == "grad_keys" else {}
    signature, attributes = {}, {}
    for place, name in enumerate(function.arg_names):
        kind = _argument(name, numerics, dtype)
        if kind is None or re.fullmatch(r"(q|k|v|do)_d", name):
            constants.setdefault(name, 1)
            kind = "constexpr"
        elif kind.startswith("*") or STRIDE.fullmatch(name):
            attributes[(place,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _usage(built.asm["cubin"]) if usage else (None, None)
    return Compiled(
        kernel, capability, blocks, built.asm["ptx"], built.metadata.shared, registers, spilled
    )


def compile_hopper(
    numerics: Numerics,
    kernel: str = "forward",
    *,
    head_dim: int = 64,
    causal: bool = True,
    probe: bool | str = False,
    usage: bool = True,
    plan: Plan | None = None,
) -> Compiled:
    """Compile a kernel of `kernels.hopper_attention` for compute capability 9.0 as a launch would.

    kernel: "forward", "grad_keys" or "grad_queries". plan: other settings of the forward than the
    usual. Seconds per call.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from . import hopper_attention

    function, arguments, blocks = _hopper(numerics, kernel, head_dim, causal, probe, plan)
    options = {name: arguments[name] for name in ("num_warps", "maxnreg", "enable_fp_fusion")}
    constants = {name: x for name, x in arguments.items() if name not in options}
    tile = hopper_attention.TILE if kernel == "forward" else hopper_attention.ROWS
    signature, attributes = {}, {}
    for place, name in enumerate(function.arg_names):
        if name.endswith("_desc"):
            signature[name] = _descriptor(name, tile, head_dim)
        elif name in constants:
            signature[name] = "constexpr"
        else:
            kind = _argument(name, numerics, torch.bfloat16)
            signature[name] = kind or "i32"
            if name.endswith("_ptr") or STRIDE.fullmatch(name):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(function, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled = _usage(built.asm["cubin"]) if usage else (None, None)
    return Compiled(
        kernel, 90, blocks, built.asm["ptx"], built.metadata.shared, registers, spilled,
        built.asm["cubin"], built.asm["ttgir"],
    )  # fmt: skip


def _hopper(n: Numerics, kernel: str, head_dim: int, causal: bool, probe: bool | str, plan):
    """(function, arguments of its launch, blocks) of a kernel for Hopper GPUs."""
    from . import hopper_attention as hopper

    scale, rows = 1 / math.sqrt(head_dim), hopper.PARTS * hopper.ROWS
    if kernel == "forward":
        from .hopper_forward import hopper_forward_kernel

        arguments = hopper.launch_arguments(n.key, scale, causal, probe, head_dim, plan)
        blocks = Blocks(rows, hopper.TILE, 12, arguments["STAGES"], arguments["maxnreg"])
        return hopper_forward_kernel, arguments, blocks
    from . import hopper_backward

    plan = hopper.BACKWARD_PLAN
    arguments = hopper.backward_arguments(n.key, scale, causal, plan)
    if kernel == "grad_keys":
        sizes, function = (hopper.WALKED, rows), hopper_backward.hopper_grad_keys_kernel
    elif kernel == "grad_queries":
        sizes, function = (rows, hopper.WALKED), hopper_backward.hopper_grad_queries_kernel
    else:
        raise ValueError(f"unknown kernel {kernel!r}; use forward, grad_keys or grad_queries")
    return function, arguments, Blocks(*sizes, 12, plan.stages, plan.launch_registers)


def _descriptor(name: str, tile: int, head_dim: int) -> str:
    """The type of a descriptor of the copy engine in Triton's notation."""
    from triton.experimental.gluon import language as gl

    from .hopper_attention import ROWS

    if name in ("lse_desc", "delta_desc"):
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
        return f"tensordesc<fp32[1, 1, {tile}],{layout!r}>"
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    rows = ROWS if name in ("q_desc", "o_desc") else tile
    return f"tensordesc<bf16[1, 1, {rows}, {head_dim}],{layout!r}>"


def machine_code(cubin: bytes) -> list[tuple[str, str]]:
    """(operation, operands) of each instruction of a cubin, in order; needs Triton's cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pattern = r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);"
    return re.findall(pattern, text)


def in_flight(code):
    """(operations, operands, registers read, accumulators) from each product to its wait.

    A product reads its A operand's registers and owns its accumulator until the wait that covers
    the group it was committed with; SASS closes a group with `gsb0`.
    """
    groups, reads, owns = [], set(), set()
    for operation, operands in code:
        if operation.startswith("HGMMA"):
            parts = [part.strip() for part in operands.split(",")]
            first = int(re.match(r"R(\d+)", parts[0])[1])
            owns |= set(range(first, first + int(re.search(r"64x(\d+)x16", operation)[1]) // 2))
            if found := re.match(r"R(\d+)", parts[1]):
                reads |= set(range(int(found[1]), int(found[1]) + 4))
            if "gsb0" in operands:
                groups.append((reads, owns))
                reads, owns = set(), set()
        elif operation == "WARPGROUP.DEPBAR.LE":
            left = int(re.search(r"0x([0-9a-f]+)", operands)[1], 16)
            del groups[: max(len(groups) - left, 0)]
        else:
            pending = [*groups, (reads, owns)]
            yield operation, operands, *(set().union(*x) for x in zip(*pending)), len(groups)


def beside_products(code, operation: str):
    """(how many `operation` run beside a product, instructions that a product in flight forbids).

    code: of `machine_code`. Forbidden is to write what products read, and to touch what they own.
    """
    count, hazards = 0, []
    for found, operands, reads, owns, groups in in_flight(code):
        used = [int(x) for x in re.findall(r"\bR(\d+)\b", operands)]
        stores = found.startswith(("ST", "RED", "ATOM", "SYNCS", "BAR"))
        if owns & set(used) or (used and not stores and used[0] in reads):
            hazards.append((found, operands))
        count += found == operation and groups >= 1
    return count, hazards


def _kernel(kernel: str):
    from . import triton_backward, triton_forward

    module = triton_forward if kernel == "forward" else triton_backward
    return getattr(module, f"{kernel}_kernel")


def _argument(name: str, n: Numerics, dtype: torch.dtype) -> str | None:
    """The type of a kernel argument in Triton's notation; None for a constexpr."""
    if name in ("q_ptr", "k_ptr", "v_ptr", "do_ptr"):
        bits = host._bits(n.inputs)
        stored = dtype if bits == 23 else host._storage(n.inputs)
        return "*" + _TYPES[stored]
    if name == "out_ptr":
        return "*" + _TYPES[host._storage(n.output)]
    if name == "hp_ptr":
        return "*" + _TYPES[host._storage(n.delta_output) if n.delta_output else torch.float32]
    if name in ("dq_ptr", "dk_ptr", "dv_ptr"):
        return "*" + _TYPES[host._storage(n.gradients)]
    if name in ("ties_ptr", "ones_ptr", "counter_ptr"):
        return "*i32"
    if name == "seed_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32"
    if name in ("scale", "inverse_unit", "beta", "eps", "shift", "min_offset", "max_offset"):
        return "fp32"
    if name in ("H", "GROUP", "Tq", "Tk") or re.fullmatch(r"d?[qkvo]_[bhtd]", name):
        return "i32"
    return None


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers per thread and spilled (stack) bytes, from the cubin; None without cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    return tuple(int(m[1]) if m else None for m in (registers, stack))
