"""The version of pycollect; the build reads it from here and adds what it is for."""

__version__ = "0.1.0"
