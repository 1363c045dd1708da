"""Side-by-side measurements against rsl-rl-lib and TorchRL's defaults: ``python -m benchmarks``."""
