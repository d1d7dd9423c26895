"""Chips: everything that is known of each TPU generation, in one value.

Peaks are of one JAX device: a whole chip, except on v2, v3 and 7x, where a device is one of the
chip's two TensorCores (v4 and v5p join theirs: megacore). They are the vendor's, which equal
MXUs x 2 x side^2 x clock.

Clocks, HBM and link rates are the vendor's (v6e's and 7x's clocks: assumed), those of HBM and links
from https://cloud.google.com/tpu/docs/system-architecture-tpu-vm. cycles_share and
matmul_efficiency are fitted by `benchmarks/plan_accuracy.py --fit` to one published run each for
v4, v5e, v5p and v6e; v2 and v3 take v4's share, 7x v5p's, and their efficiencies are assumed.
Above one, the chip, or the published run's tiles and layouts, are better than the compiler expects
of our program.

Networks: v5e and v6e from https://cloud.google.com/tpu/docs/v5e (6.4 Tbit/s a pod of 256) and
https://cloud.google.com/tpu/docs/v6e (25.6); v4 and v5p: 200 Gbit/s a host of four chips; the
others are assumed equal to a neighbor.

Cycles of attention kernels are those of libtpu's own schedule for blocks of 512 tokens in
bfloat16, as `benchmarks/attention_schedule.py` reads it (`--splash` for JAX's kernel).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30

SQUARES = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16),
           256: (16, 16)}  # fmt: skip
OLD_SQUARES = {4: (2, 2), 16: (4, 4), 64: (8, 8), 128: (8, 16), 256: (16, 16), 512: (16, 32),
               1024: (32, 32)}  # fmt: skip
CUBES = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4),
         128: (4, 4, 8), 256: (4, 8, 8), 512: (8, 8, 8), 1024: (8, 8, 16), 2048: (8, 16, 16),
         4096: (16, 16, 16)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak performance of one device."""

    bf16_flops: float
    """Multiply-adds in bfloat16, counted as two operations, per second."""
    hbm_bytes: int
    """Memory on the device."""

    usable_bytes: int = 0
    """Bytes that the TPU compiler lets a program use, as its out-of-memory message says; 0 where
    that is not known."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device of a TPU generation, for `plan`."""

    clock_hz: float
    """bf16 peak over 2 x side^2 x number of MXUs."""
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """One way over one link between chips."""
    host_bytes_per_s: float = 16e9
    """One way over the PCIe bus of a device, as "How to Scale Your Model" gives it
    (https://jax-ml.github.io/scaling-book/tpus)."""
    cycles_share: float
    """The compiler's cycles over those that published runs took, of all that the core does."""
    clock_known: bool = True
    """True if the clock is known. Where not, `cycles_share` makes up for it, in kernels as well."""
    cores: int = 1
    """TensorCores of the device."""
    attention_cycles: float = 1.8e-3
    """Cycles of one core, beyond the matrix units' own, for each score and product of the attention
    kernel; see `planner.compiler.kernel_cost`."""

    @property
    def kernel_share(self) -> float:
        """The share for cycles of a kernel's final schedule, which nothing beats."""
        return min(1.0, self.cycles_share) if self.clock_known else self.cycles_share

    matmul_efficiency: float = 0.8
    """Share of the peak that a large model's products reach, for the answer without a compiler."""
    attention_efficiency: float = 0.5
    """The same of the attention kernel; assumed."""


@dataclass(frozen=True)
class AttentionCycles:
    """Cycles of one core for `kernels/tpu_row_attention.py`."""

    forward: float
    """Cycles for 1,000 scores below the blocks of the diagonal."""
    backward: float
    around_forward: float
    """Cycles for each token of a head beside these, the diagonal among it."""
    around_backward: float


@dataclass(frozen=True, kw_only=True)
class SplashCycles:
    """Cycles of one core for 1,000 scores of the blocks that JAX's splash kernel visits, as
    `kernels/tpu_splash.py` chooses them."""

    fwd: float
    bwd: float
    """All three gradients, in one kernel."""


LONG_ROWS = {"dkv": 0.84, "dq": 0.66}
"""The two backward kernels of rows too long for one, in its cycles: 5.29 and 4.44 of 6.35 on v6e,
8.56 and 6.25 of 10.16 on v5p, with heads of 128."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD for one chip (or GPU) and hour, by the list; see `hardware.devices`."""

    on_demand: float
    spot: float | None = None
    """Price of spot chips in the cheapest US region, by the SkyPilot catalog
    (github.com/skypilot-org/skypilot-catalog); None where we have no figure."""


@dataclass(frozen=True)
class CloudNames:
    """Names in the Cloud TPU API; https://cloud.google.com/tpu/docs/runtimes."""

    prefix: str
    """Beginning of an accelerator type, as in v5litepod-16."""
    api_type: str
    """Type with a topology in place of a size."""
    runtime: str = "tpu-ubuntu2204-base"
    """Image of the host's operating system."""
    alone: tuple[int, ...] = (4,)
    """Chips of the slices that have a single host; larger ones have 4 on each."""
    disks: str = "pd"
    """Beginning of the types of disks that it attaches."""


@dataclass(frozen=True)
class Power:
    """Electric power of a chip while programs run."""

    least_w: float | None
    """Watts; None where only the most is published."""
    most_w: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation."""

    name: str
    """Name as users and price lists write it."""
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...]
    """Names that JAX reports, today's first."""
    compiler_name: str
    chip_config: str | None = None
    count: int
    """Units in a slice's name per chip."""
    devices_per_chip: int
    layouts: Mapping[int, tuple[int, ...]]
    """Chips of a slice to its torus shape."""
    pod_chips: int
    """Chips of the largest slice."""
    pod_side: int | None = None
    """Length at which an axis of a 2D torus closes to a ring; None for the 3D generations."""
    peak: Peak
    rates: Rates
    network_bytes_per_s: float
    """Speed of a chip's traffic between slices."""
    host_gib: float
    """Memory of the host for each chip, by the machine types of
    https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus."""
    price: Price
    power: Power | None = None
    """None where it is not published."""
    int8_units: bool = False
    """True if its matrix units multiply int8 at twice the rate of bfloat16."""
    strided_rotation: bool = True
    """True if it has a rotation that grows from row to row."""
    calibrated: bool = False
    """True if a published run fitted its constants."""
    cloud: CloudNames | None = None
    """None where only Kubernetes has it."""
    kubernetes: str = ""
    """Label `cloud.google.com/gke-tpu-accelerator` of its nodes; empty where GKE lacks it."""
    kubernetes_alone: str = ""
    """That of nodes which are a slice of their own, if it is another."""
    row_attention: Mapping[int, AttentionCycles] = field(default_factory=dict)
    """Cycles of the row kernel by head size; empty where it does not run."""
    disentangled: tuple[float, float] | None = None
    """Cycles of one core for 1,000 scores of `kernels/tpu_disentangled.py` in rows of 512 tokens
    and heads of 64, all that is around them included, forward and backward."""
    splash: Mapping[int, SplashCycles] = field(default_factory=dict)
    """Cycles of the splash kernel by head size."""

    @property
    def device_kind(self) -> str:
        """The kind of its devices, as JAX reports it today."""
        return self.device_kinds[0]


_EVERY = (
    Chip(
        name="v2", device_kinds=("TPU v2",), compiler_name="v2", count=2, devices_per_chip=2,
        layouts={k: OLD_SQUARES[k] for k in (4, 16, 64, 128, 256)}, pod_chips=256, pod_side=16,
        peak=Peak(bf16_flops=46e12 / 2, hbm_bytes=8 * GIB),
        rates=Rates(clock_hz=0.7e9, hbm_bytes_per_s=350e9, link_bytes_per_s=62e9,
              cycles_share=0.895, matmul_efficiency=0.8),
        host_gib=83.5,
        network_bytes_per_s=3.1e9, price=Price(on_demand=1.50), cloud=CloudNames("v2", "V2"),
    ),
    Chip(
        name="v3", device_kinds=("TPU v3",), compiler_name="v3", count=2, devices_per_chip=2,
        layouts=OLD_SQUARES, pod_chips=1024, pod_side=32,
        peak=Peak(bf16_flops=123e12 / 2, hbm_bytes=16 * GIB, usable_bytes=16_621_523_435),
        rates=Rates(clock_hz=0.94e9, hbm_bytes_per_s=450e9, link_bytes_per_s=82e9,
              cycles_share=0.895, matmul_efficiency=0.8),
        host_gib=85,
        network_bytes_per_s=3.1e9, price=Price(on_demand=2.00), cloud=CloudNames("v3", "V3"),
        power=Power(123, 262, "measured, cloud.google.com/tpu/docs/v3"),
        kubernetes="tpu-v3-slice", kubernetes_alone="tpu-v3-device",
    ),
    Chip(
        name="v4", device_kinds=("TPU v4",), compiler_name="v4", chip_config="megacore",
        count=2, devices_per_chip=1, layouts={k: v for k, v in CUBES.items() if k <= 2048},
        pod_chips=4096,
        peak=Peak(bf16_flops=275e12, hbm_bytes=32 * GIB, usable_bytes=33_017_561_088),
        rates=Rates(clock_hz=1.05e9, hbm_bytes_per_s=1228e9, link_bytes_per_s=45e9,
              cycles_share=0.895, cores=2, matmul_efficiency=0.765),
        host_gib=101.75,
        network_bytes_per_s=6.25e9, price=Price(on_demand=3.22), calibrated=True,
        power=Power(90, 192, "measured, cloud.google.com/tpu/docs/v4"),
        cloud=CloudNames("v4", "V4"), strided_rotation=False,
        kubernetes="tpu-v4-podslice",
        splash={96: SplashCycles(fwd=9.4, bwd=13.3), 256: SplashCycles(fwd=18.03, bwd=26.47)},
        disentangled=(46.5, 84.9),
        row_attention={
            64: AttentionCycles(6.34, 8.71, 3.39, 5.17),
            96: AttentionCycles(6.86, 10.03, 3.80, 5.96),
            128: AttentionCycles(7.38, 11.17, 4.24, 6.67),
            256: AttentionCycles(10.87, 19.17, 6.85, 12.24),
        },
    ),
    Chip(
        name="v5e", aliases=("v5litepod", "v5lite"), device_kinds=("TPU v5 lite", "TPU v5e"),
        compiler_name="v5e", count=1, devices_per_chip=1, layouts=SQUARES, pod_chips=256,
        pod_side=16,
        peak=Peak(bf16_flops=197e12, hbm_bytes=16 * GIB, usable_bytes=16_911_433_728),
        rates=Rates(clock_hz=1.5e9, hbm_bytes_per_s=819e9, link_bytes_per_s=45e9,
              cycles_share=1.162, matmul_efficiency=0.833),
        host_gib=48,
        network_bytes_per_s=3.1e9, price=Price(on_demand=1.20), calibrated=True,
        cloud=CloudNames("v5litepod", "V5LITE_POD", "v2-alpha-tpuv5-lite", alone=(1, 4, 8)),
        int8_units=True,
        kubernetes="tpu-v5-lite-podslice",
        splash={256: SplashCycles(fwd=13.43, bwd=21.70)},
        disentangled=(13.0, 28.2),
        row_attention={
            64: AttentionCycles(4.20, 6.43, 2.17, 4.01),
            96: AttentionCycles(4.77, 7.72, 2.63, 4.94),
            128: AttentionCycles(5.45, 8.90, 2.88, 5.49),
            256: AttentionCycles(8.63, 17.77, 5.20, 11.22),
        },
    ),
    Chip(
        name="v5p", device_kinds=("TPU v5", "TPU v5p"), compiler_name="v5p", count=2,
        devices_per_chip=1, layouts=CUBES, pod_chips=8960,
        peak=Peak(bf16_flops=459e12, hbm_bytes=95 * GIB, usable_bytes=102_800_042_229),
        rates=Rates(clock_hz=1.75e9, hbm_bytes_per_s=2765e9, link_bytes_per_s=90e9,
              cycles_share=1.254, cores=2, matmul_efficiency=0.929),
        host_gib=112,
        network_bytes_per_s=6.25e9, price=Price(on_demand=4.20, spot=0.93), calibrated=True,
        cloud=CloudNames("v5p", "V5P", "v2-alpha-tpuv5"), int8_units=True,
        kubernetes="tpu-v5p-slice",
        splash={128: SplashCycles(fwd=5.55, bwd=10.16)},
        disentangled=(13.1, 28.2),
        row_attention={
            64: AttentionCycles(4.26, 6.45, 2.29, 4.09),
            96: AttentionCycles(4.90, 7.77, 2.67, 5.00),
            128: AttentionCycles(5.49, 8.81, 3.01, 5.86),
            256: AttentionCycles(8.62, 17.11, 5.29, 11.37),
        },
    ),
    Chip(
        name="v6e", device_kinds=("TPU v6 lite", "TPU v6e"), compiler_name="v6e", count=1,
        devices_per_chip=1, layouts=SQUARES, pod_chips=256, pod_side=16,
        peak=Peak(bf16_flops=918e12, hbm_bytes=32 * GIB, usable_bytes=33_554_432_000),
        rates=Rates(clock_hz=1.75e9, hbm_bytes_per_s=1640e9, link_bytes_per_s=90e9,
              host_bytes_per_s=32e9, cycles_share=1.203, clock_known=False,
              matmul_efficiency=0.685),
        host_gib=180,
        network_bytes_per_s=12.5e9, price=Price(on_demand=2.70, spot=0.57), calibrated=True,
        cloud=CloudNames("v6e", "V6E", "v2-alpha-tpuv6e", alone=(1, 4, 8), disks="hyperdisk"),
        int8_units=True,
        kubernetes="tpu-v6e-slice",
        splash={128: SplashCycles(fwd=4.09, bwd=6.35)},
        disentangled=(9.9, 22.2),
        row_attention={
            64: AttentionCycles(3.21, 4.22, 1.71, 2.70),
            96: AttentionCycles(3.48, 4.76, 1.88, 3.03),
            128: AttentionCycles(3.50, 4.92, 1.92, 3.26),
            256: AttentionCycles(4.54, 6.63, 2.78, 4.63),
        },
    ),
    Chip(
        name="7x", aliases=("tpu7x", "v7x"), device_kinds=("TPU7x",), compiler_name="tpu7x",
        count=2, devices_per_chip=2, layouts=CUBES, pod_chips=9216,
        peak=Peak(bf16_flops=2307e12 / 2, hbm_bytes=96 * GIB, usable_bytes=101_737_037_824),
        rates=Rates(clock_hz=2.2e9, hbm_bytes_per_s=3690e9, link_bytes_per_s=90e9,
              cycles_share=1.254, matmul_efficiency=0.8),
        host_gib=240,
        network_bytes_per_s=12.5e9, price=Price(on_demand=12.00),
        kubernetes="tpu7x",
        disentangled=(9.9, 20.8),
        row_attention={
            64: AttentionCycles(2.98, 4.14, 1.60, 2.51),
            96: AttentionCycles(3.10, 4.42, 1.77, 2.78),
            128: AttentionCycles(3.26, 4.71, 1.96, 2.92),
            256: AttentionCycles(4.12, 6.13, 2.70, 4.29),
        },
    ),
)  # fmt: skip
CHIPS = {chip.name: chip for chip in _EVERY}
