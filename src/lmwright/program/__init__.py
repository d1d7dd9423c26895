"""The program: plan, state and train step, the one jit that training runs and plan compiles."""
