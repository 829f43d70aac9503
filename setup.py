"""Only setup.py can name cffi modules; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["csrc/build_native.py:ffibuilder"])
