"""Side-by-side measurements against rsl-rl-lib and TorchRL's defaults: ``python -m benchmarks``."""

import os

# Read when TorchRL and torch are imported. The first is in TorchRL's favour: its advice on every
# `ReplayBuffer.add` of a row is not made up, nor paid for. The others keep what is printed to the table.
os.environ.setdefault("RL_WARNINGS", "0")
os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts memory
