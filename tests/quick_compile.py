"""XLA's flags for tests, which compile far more than they compute."""

from importlib.metadata import version

FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    # the older way to emit fusions compiles in a third of the time; later ones crash on it
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    # a program in one piece: the two workers have no idle core to compile several at once, and
    # many small ones take half as much again
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
