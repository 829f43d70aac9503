"""Describe `superfluid._native` to cffi: every csrc/*.h is a declaration, every csrc/*.c a source.

A header here holds plain C declarations only (no preprocessor lines), so that cffi reads it as it is.
"""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
headers = sorted(HERE.glob("*.h"))
sources = sorted(HERE.glob("*.c"))

ffibuilder = FFI()
ffibuilder.cdef("\n".join(header.read_text() for header in headers))
ffibuilder.set_source(
    "superfluid._native",
    "#include <stddef.h>\n#include <stdint.h>\n" + "\n".join(f'#include "{header.name}"' for header in headers),
    sources=[f"csrc/{source.name}" for source in sources],
    include_dirs=["csrc"],
    # -ffp-contract=off: a fused multiply-add would make a draw depend on the machine (spec: sampling)
    extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
