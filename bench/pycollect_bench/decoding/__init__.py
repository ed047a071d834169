"""Tensor-parallel decoding of a Llama-shaped model, for bench/tensor_parallel.py."""
