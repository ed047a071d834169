"""The version of pycollect; the build reads it from here and appends its torch and CUDA."""

__version__ = "0.1.0"
