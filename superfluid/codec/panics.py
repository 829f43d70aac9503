"""Panics of native libraries written in Rust. They come as an exception that is no `Exception`, so that nothing takes
them for one by accident; what panicked may not be used again, the process may."""


def is_panic(error: BaseException) -> bool:
    """Whether a native library panicked. Each has a class of its own for it, which cannot be imported."""
    return any(cls.__name__ == "PanicException" for cls in type(error).__mro__)
