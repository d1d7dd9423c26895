"""XLA's flags for tests, which compile far more than they compute."""

# Without optimization, and without the newer way to emit fusions, compiling takes a third.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)
